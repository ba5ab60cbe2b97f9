"""Tensor parallelism refuses what it cannot cut, by key, value, rule and legal values."""

import pytest

from experiments.command import CHECKS
from research import settings
from research.problems import ConfigError

TINY = "experiments/configs/tiny.yaml"


@pytest.mark.parametrize(
    "words, told",
    [
        ("tp.degree=3", r"tp.degree=3 must divide model.heads=8; legal: 1, 2, 4, 8"),
        ("tp.degree=3", r"tp.degree=3 must divide the shared width model.shared_experts\*model.expert_ffn=32"),
        ("tp.degree=4 model.heads=12 model.kv_heads=6", r"must divide model.kv_heads=6, or be a multiple of it"),
        ("tp.degree=4 model.ffn=130", r"tp.degree=4 must divide model.ffn=130; legal: 1, 2, 5"),
        ("tp.degree=2 model.dense_layers=0 model.moe_every=2 model.ffn=97", r"tp.degree=2 must divide model.ffn=97"),
        ("tp.degree=2 data.sequence=63", r"tp.degree=2 must divide the 63 tokens of a sample on each rank"),
        ("tp.degree=2 data.sequence=63 tp.sequence=false", r"must divide the 63 tokens of a sample on each rank"),
        ("tp.degree=8 model.kv_heads=8 model.vocab=7", r"tp.degree=8 exceeds model.vocab=7; legal: 1 to 7"),
        (
            "tp.degree=4 tp.overlap=17",
            r"tp.overlap=17 exceeds the 16 tokens of a sample that each rank sends; legal: 1 to 16",
        ),
        ("tp.degree=2 tp.sequence=false tp.keep_gathered=true", r"tp.keep_gathered=true has nothing to keep"),
        ("tp.degree=0", r"tp.degree=0 is out of range"),
    ],
)
def test_refused(words, told):
    with pytest.raises(ConfigError, match=told):
        settings.load(TINY, words.split(), CHECKS)


@pytest.mark.parametrize(
    "words",
    ["tp.degree=8", "tp.degree=2 data.sequence=63 tp.sequence=false model.experts=0", "tp.degree=4 model.vocab=257"],
)
def test_accepted(words):
    settings.load(TINY, words.split(), CHECKS)
