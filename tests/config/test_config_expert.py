"""Expert parallelism refuses what it cannot share, by key, value, rule and legal values."""

import pytest

from experiments.command import CHECKS
from research import settings
from research.problems import ConfigError

TINY = "experiments/configs/tiny.yaml"


@pytest.mark.parametrize(
    "words, told",
    [
        ("dp.degree=3 ep.degree=3", r"ep.degree=3 must divide model.experts=8; legal: 1, 2, 4, 8"),
        ("dp.degree=2 ep.degree=4", r"ep.degree=4 must divide dp\*cp\*tp=2; legal: 1, 2"),
        ("ep.degree=2", r"ep.degree=2 must divide dp\*cp\*tp=1; legal: 1"),
        ("dp.degree=4 ep.degree=2 ep.tensor=4", r"ep.tensor=4 must divide dp\*cp\*tp/ep.degree=2; legal: 1, 2"),
        ("dp.degree=3 ep.tensor=3", r"ep.tensor=3 must divide model.expert_ffn=32; legal: 1, 2, 4, 8, 16, 32"),
        ("dp.degree=2 ep.degree=2 model.experts=0", r"ep.degree=2 has no experts to share with model.experts=0"),
        ("dp.degree=2 ep.tensor=2 model.experts=0", r"ep.tensor=2 has no experts to share with model.experts=0"),
        ("dp.degree=4 ep.overlap=129", r"ep.overlap=129 exceeds the 128 tokens .* of a rank; legal: 1 to 128"),
        ("ep.overlap=0", r"ep.overlap=0 is out of range"),
        ("ep.dispatch=broadcast", r"ep.dispatch=broadcast is not one of its choices; legal: all_to_all, all_gather"),
    ],
)
def test_refused(words, told):
    with pytest.raises(ConfigError, match=told):
        settings.load(TINY, words.split(), CHECKS)


def test_all_at_once():
    with pytest.raises(ConfigError) as caught:
        settings.load(TINY, ["dp.degree=2", "ep.degree=6", "ep.tensor=5", "model.experts=9"], CHECKS)
    assert sorted(p.key for p in caught.value.problems) == ["ep.degree", "ep.degree", "ep.tensor"]


@pytest.mark.parametrize(
    "words",
    [
        "dp.degree=4 tp.degree=2 ep.degree=8",
        "tp.degree=4 ep.degree=2 ep.tensor=2 ep.dispatch=all_gather",
        "dp.degree=4 ep.degree=4 ep.overlap=128",
    ],
)
def test_accepted(words):
    settings.load(TINY, words.split(), CHECKS)


def test_folds_over_the_world():
    config = settings.load(TINY, ["ep.degree=4", "ep.tensor=2", "tp.degree=2"], CHECKS, world=8)
    assert config.dp.degree == 4
