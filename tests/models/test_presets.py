"""Published models by name: their counts, and what a preset is to the other keys."""

from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
import yaml

from research import settings
from research.config import ModelConfig, RunConfig
from research.models.decoder import Decoder, active_parameters, specs
from research.models.flops import flops_per_token
from research.presets import PRESETS
from research.problems import ConfigError
from tests.models.cache_size import cache_elements

COUNTS, OPERATIONS, AHEAD, CACHES, NOT_REPRODUCED, LOOKED_UP = (
    t["rows"] for t in yaml.safe_load(Path("experiments/papers/models.yaml").read_text())
)


def declared(preset, *words):
    model = settings.load(None, [f"model.preset={preset}", *words]).model
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


@pytest.mark.parametrize("preset, sequence, gflop, told", NOT_REPRODUCED)
def test_operations_that_are_told_otherwise(preset, sequence, gflop, told):
    """Should a figure come out one day, it belongs to the table of those that do."""
    model, of = declared(preset)
    for causal in (True, False):
        assert flops_per_token(model, of, sequence, causal) / 1e9 != pytest.approx(told, rel=4e-3)
    assert flops_per_token(model, of, sequence, causal=True) / 1e9 == pytest.approx(gflop, rel=3e-4)


@pytest.mark.parametrize("preset, active, told", LOOKED_UP)
def test_active_parameters_without_the_input_embedding(preset, active, told):
    model, of = declared(preset)
    assert active_parameters(model, of) - of["embedding.weight"].numel == active
    assert active / 1e9 == pytest.approx(told, rel=0.025)  # two digits are told


@pytest.mark.parametrize("preset, changes, elements, told, unit", CACHES)
def test_cache(preset, changes, elements, told, unit):
    model = settings.load(None, [f"model.preset={preset}", *changes]).model
    assert cache_elements(model) == elements
    computed = elements * 2 if unit == "KB" else elements  # bfloat16
    assert round(computed / 1000, 3 if unit == "KB" else 1) == told


def test_cache_of_each_kind_of_attention():
    """Table 1 of DeepSeek-V2: 2 n_h d_h l, 2 n_g d_h l, 2 d_h l, and about 4.5 d_h l for latents of its widths."""
    words = ["model.layers=3", "model.heads=16", "model.head_dim=128"]
    for kv_heads in (16, 4, 1):
        model = settings.load(None, [*words, f"model.kv_heads={kv_heads}"]).model
        assert cache_elements(model) == 2 * kv_heads * 128 * 3
    latent = settings.load(None, ["model.preset=deepseek_v2"]).model
    assert cache_elements(latent) == 4.5 * 128 * latent.layers


def test_cache_is_smaller_than_that_of_deepseek_67b():
    """DeepSeek-V2's abstract tells 93.3 % less than its dense predecessor (95 layers, 8 kv heads of 128): elements are
    82.2 % fewer, and the rest is that it serves with 6 bits for each (section 3.2.3) where 67B has bfloat16."""
    dense = settings.load(None, ["model.heads=64", "model.layers=95", "model.kv_heads=8", "model.head_dim=128"]).model
    latent = settings.load(None, ["model.preset=deepseek_v2"]).model
    kept = cache_elements(latent) / cache_elements(dense)
    assert 1 - kept == pytest.approx(0.822, abs=5e-4)
    assert 1 - kept * 6 / 16 == pytest.approx(0.933, abs=5e-4)


def test_every_preset_is_a_legal_value_and_has_counts():
    legal = get_args(get_type_hints(ModelConfig)["preset"])
    assert list(legal) == ["none", *PRESETS]
    assert [row[0] for row in COUNTS] == list(PRESETS)


def test_a_preset_is_other_defaults(tmp_path):
    base = tmp_path / "base.yaml"
    base.write_text("model: {preset: llama3_8b, layers: 7}")
    model = settings.load(base, ["model.heads=16"]).model
    assert (model.layers, model.heads, model.dim, model.rope_scaling) == (7, 16, 4096, "llama3")
    assert settings.load(base, ["model.preset=deepseek_v3"]).model.layers == 7  # what is given counts, wherever


@pytest.mark.parametrize("changed", [[], ["model.layers=4", "model.dense_layers=1"]])  # defaults without it
def test_words_and_mapping_give_it_back(changed):
    config = settings.load(None, ["model.preset=deepseek_v3", *changed])
    assert settings.load(None, settings.to_words(config)) == config
    assert settings.from_mapping(settings.to_mapping(config)) == config
    assert settings.to_words(config) == [*changed, "model.preset=deepseek_v3", "dp.degree=1"]


def test_planted_miscount(monkeypatch):
    preset, total, active, told = COUNTS[-1]
    monkeypatch.setitem(PRESETS, preset, {**PRESETS[preset], "kv_latent": 511})
    with pytest.raises(AssertionError):
        test_parameters(preset, total, active, told)


def test_unknown_preset():
    with pytest.raises(ConfigError, match=r"model\.preset=llama9 is not one of its choices; legal: none, llama2"):
        settings.load(None, ["model.preset=llama9"])


def test_defaults_stay():
    assert RunConfig().model == ModelConfig() and settings.to_words(RunConfig()) == []
