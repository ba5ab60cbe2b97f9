"""A peak without ranks is the peak of ranks."""

from functools import partial

import pytest

from experiments.command import CHECKS
from research import settings
from research.data.tokens import open_tokens
from research.launch.local import start
from research.mesh import Mesh, total_ranks
from research.report.dry import dry_peaks, peak
from research.train.loop import Trainer
from research.train.memory import peak_bytes
from research.train.optim import make_moments
from research.train.run import global_batches


@pytest.fixture
def load(text, tmp_path):
    small = ["train.dtype=float32", f"data.path={text}", f"data.cache={tmp_path}/cache"]
    return lambda *words: settings.load("experiments/configs/tiny.yaml", [*small, *words], CHECKS)


def measured(config, place, device):
    trainer = Trainer(config, Mesh.from_config(config, place.world, place.rank), device)
    make_moments(trainer.storage.optimizer)
    return peak_bytes(trainer, global_batches(config, open_tokens(config.data)).microbatches_of(0))


@pytest.mark.parametrize(
    "words", [["dp.degree=2", "dp.zero=1"], ["tp.degree=2"], ["dp.degree=2", "dp.zero=3"]], ids=" ".join
)
def test_it_is_what_ranks_measure(load, words):
    """But for what gloo holds longer: counts of tokens until its thread lets go, and in stage 3 parts of a sum."""
    config = load(*words)
    moe_layers = config.model.layers - config.model.dense_layers
    late = {"activations": 8 * config.model.experts * moe_layers, "communication": 0}
    for rank, real in enumerate(start(partial(measured, config), total_ranks(config), config.launch, 60.0)):
        if config.dp.zero == 3:
            late["communication"] = (sum(real.values()) - real["communication"]) // 50
        dry = peak(config, rank)
        assert all(0 <= real[c] - dry[c] <= late.get(c, 0) for c in dry.keys() | real.keys()), (dry, real)


def test_configs_stand_beside_each_other_in_mib(load):
    table = dry_peaks({"whole": load("dp.degree=2"), "cut": load("dp.degree=2", "dp.zero=2")})
    assert table.optimizer["whole"] > 1.9 * table.optimizer["cut"] and "master" not in table
