"""Published models by name: their counts, and what a preset is to the other keys."""

from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
import yaml

from research import config as configs
from research.config import ModelConfig, RunConfig
from research.models.decoder import Decoder, active_parameters, specs
from research.models.flops import flops_per_token
from research.presets import PRESETS

COUNTS, OPERATIONS, AHEAD = (t["rows"] for t in yaml.safe_load(Path("experiments/papers/models.yaml").read_text()))


def declared(preset, *words):
    model = configs.load(None, [f"model.preset={preset}", *words]).model
    with torch.device("meta"):
        return model, specs(Decoder(model))


@pytest.mark.parametrize("preset, total, active, told", COUNTS)
def test_parameters(preset, total, active, told):
    model, of = declared(preset)
    assert sum(s.numel for s in of.values()) == total
    assert active_parameters(model, of) == active
    assert abs(total / 1e9 / float(told.split("B")[0]) - 1) < 0.01


@pytest.mark.parametrize("preset, sequence, gflop, told", OPERATIONS)
def test_operations(preset, sequence, gflop, told):
    model, of = declared(preset)
    computed = flops_per_token(model, of, sequence, causal=True) / 1e9
    assert computed == pytest.approx(gflop, rel=3e-4) and computed == pytest.approx(told, rel=4e-3)


@pytest.mark.parametrize("preset, own, own_told, active, active_told, sequence, gflop, gflop_told", AHEAD)
def test_multi_token_prediction(preset, own, own_told, active, active_told, sequence, gflop, gflop_told):
    model, of = declared(preset, "model.mtp_depth=1")
    without = active_parameters(*declared(preset))
    shared = of["embedding.weight"].numel + of["head.weight"].numel
    projection = of["mtp.1.projection"].numel
    assert sum(s.numel for n, s in of.items() if n.startswith("mtp.")) == own
    assert active_parameters(model, of) - without + shared == active
    assert [f"{(n - projection) / 1e9:.1f}B" for n in (own, active)] == [own_told, active_told]
    computed = flops_per_token(model, of, sequence, causal=True) / 1e9
    assert computed == pytest.approx(gflop, rel=3e-4) and computed == pytest.approx(gflop_told, rel=3e-4)


def test_every_preset_is_a_legal_value_and_has_counts():
    legal = get_args(get_type_hints(ModelConfig)["preset"])
    assert list(legal) == ["none", *PRESETS]
    assert [row[0] for row in COUNTS] == list(PRESETS)


def test_a_preset_is_other_defaults(tmp_path):
    base = tmp_path / "base.yaml"
    base.write_text("model: {preset: llama3_8b, layers: 7}")
    model = configs.load(base, ["model.heads=16"]).model
    assert (model.layers, model.heads, model.dim, model.rope_scaling) == (7, 16, 4096, "llama3")
    assert configs.load(base, ["model.preset=deepseek_v3"]).model.layers == 7  # what is given counts, wherever


@pytest.mark.parametrize("changed", [[], ["model.layers=4", "model.dense_layers=1"]])  # defaults without it
def test_words_and_mapping_give_it_back(changed):
    config = configs.load(None, ["model.preset=deepseek_v3", *changed])
    assert configs.load(None, configs.to_words(config)) == config
    assert configs.from_mapping(configs.to_mapping(config)) == config
    assert configs.to_words(config) == [*changed, "model.preset=deepseek_v3", "dp.degree=1"]


def test_planted_miscount(monkeypatch):
    preset, total, active, told = COUNTS[-1]
    monkeypatch.setitem(PRESETS, preset, {**PRESETS[preset], "kv_latent": 511})
    with pytest.raises(AssertionError):
        test_parameters(preset, total, active, told)


def test_unknown_preset():
    with pytest.raises(
        configs.ConfigError, match=r"model\.preset=llama9 is not one of its choices; legal: none, llama2"
    ):
        configs.load(None, ["model.preset=llama9"])


def test_defaults_stay():
    assert RunConfig().model == ModelConfig() and configs.to_words(RunConfig()) == []
