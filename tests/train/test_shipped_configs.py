"""The configs of the project are what their comments say: counted, and the small ones train and are proved."""

import re
from pathlib import Path

import pytest
import torch

from experiments.command import CHECKS
from experiments.verify import verify
from research import settings
from research.launch.local import start
from research.mesh import total_ranks
from research.models.decoder import Decoder, active_parameters, specs
from research.train.run import run

CONFIGS = Path("experiments/configs")
COUNTS = {  # all, active
    "tiny": (259392, 148800),
    "small": (3382400, 1318016),
    "llama_small": (1311872, 1311872),
    "mixtral_small": (3085440, 1315968),
    "qwen3_small": (3884416, 1131904),
    "olmoe_small": (3950720, 1198208),
    "deepseek_v2_small": (2792896, 1355200),
    "deepseek_v3_small": (3375312, 1605840),
    "llama_1b": (1235814400, 1235814400),
    "moe_gpu": (1290011648, 299107328),
    "mixtral_8x7b": (46702792704, 12879925248),
    "qwen3_30b_a3b": (30532122624, 3353032704),
    "deepseek_v2_lite": (15706484224, 2661150208),
    "deepseek_v3": (671026419200 + 11610068224, 38240398080),  # with its multi-token prediction
}
SMALL = [name for name in COUNTS if name.endswith("_small")]


def words(text, tmp_path):
    """Little text, as bytes, and another optimisation: each step of the small models shows."""
    data = [f"data.path={text}", f"data.cache={tmp_path}/cache", "data.tokenizer=bytes", "data.sequence=48"]
    return [*data, f"record.folder={tmp_path}", "train.global_batch=8", "dp.degree=2"]


def test_every_config_has_counts():
    assert set(COUNTS) == {p.stem for p in CONFIGS.glob("*.yaml")}


@pytest.mark.parametrize("name", COUNTS)
def test_parameters(name):
    path = CONFIGS / f"{name}.yaml"
    model = settings.load(path, (), CHECKS).model
    with torch.device("meta"):
        of = specs(Decoder(model))
    counts = sum(s.numel for s in of.values()), active_parameters(model, of)
    assert counts == COUNTS[name]
    told = re.search(r"([\d.]+) (k|M|B) parameters", path.read_text().replace("\n# ", " "))
    if told:
        unit = {"k": 1e3, "M": 1e6, "B": 1e9}[told[2]]
        digits = len(told[1].partition(".")[2])
        assert f"{counts[0] / unit:.{digits}f}" == told[1]
    assert told or name == "tiny"


@pytest.mark.parametrize("name", SMALL)
def test_a_small_one_trains(name, text, tmp_path):
    faster = ["train.steps=8", "train.warmup_steps=2", "train.lr=0.003"]
    config = settings.load(CONFIGS / f"{name}.yaml", [*words(text, tmp_path), *faster], CHECKS)
    row = start(lambda place, device: run(config, place, device), total_ranks(config), config.launch, 60.0)[0]
    assert row.losses[-1] < row.losses[0] - 1.0 and row.skipped_steps == 0


@pytest.mark.parametrize("name", SMALL)
def test_a_small_one_is_proved(name, text, tmp_path, capsys):
    assert verify([str(CONFIGS / f"{name}.yaml"), *words(text, tmp_path), "train.steps=1"], None) == 0
    assert "FAIL" not in capsys.readouterr().out
