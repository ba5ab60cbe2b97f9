"""Context parallelism refuses what it cannot cut, by key, value, rule and legal values."""

import pytest

from experiments.command import CHECKS
from research.problems import ConfigError
from research.settings import load

TINY = "experiments/configs/tiny.yaml"


@pytest.mark.parametrize(
    "words, told",
    [
        (
            "cp.degree=2 data.sequence=30",
            r"data.sequence=30 must be a multiple of 4 \(2\*cp.degree.*; legal: 28, 32, ..",
        ),
        (
            "cp.degree=4 data.sequence=31",
            r"data.sequence=31 must be a multiple of 8 \(2\*cp.degree, with cp.method=ring and cp.balance=zigzag",
        ),
        ("cp.degree=4 data.sequence=34 cp.balance=none", r"data.sequence=34 must be a multiple of 4 \(cp.degree, with"),
        ("cp.degree=4 data.sequence=3 cp.balance=none", r"data.sequence=3 must be a multiple of 4 .*; legal: 4, .."),
        (
            "cp.degree=2 data.sequence=31 cp.balance=striped",
            r"data.sequence=31 must be a multiple of 2 \(cp.degree, with",
        ),
        ("cp.degree=2 data.sequence=33 cp.method=ulysses", r"data.sequence=33 must be a multiple of 2 \(cp.degree"),
        (
            "cp.degree=4 data.sequence=36 cp.method=hybrid cp.ulysses=2",
            r"data.sequence=36 must be a multiple of 8 \(2\*cp.degree",
        ),
        (
            "cp.degree=3 cp.method=ulysses data.sequence=66",
            r"cp.degree=3 must divide the 8 heads of each rank \(model.heads/tp.degree\), with cp.method=ulysses",
        ),
        ("cp.degree=8 cp.method=ulysses tp.degree=2", r"cp.degree=8 must divide the 4 heads of each rank"),
        (
            "cp.degree=6 cp.method=hybrid cp.ulysses=3 data.sequence=60",
            r"cp.ulysses=3 must divide the 8 heads of each rank \(model.heads/tp.degree\), with cp.method=hybrid",
        ),
        ("cp.degree=4 cp.method=hybrid cp.ulysses=3", r"cp.ulysses=3 must divide cp.degree=4; legal: 1, 2, 4"),
        ("cp.degree=4 cp.ulysses=2", r"cp.ulysses=2 is no part of cp.method=ring; legal: 1, or cp.method=hybrid"),
        ("cp.degree=2 tp.degree=4 data.sequence=36", r"tp.degree=4 must divide the 18 tokens of a sample on each rank"),
        (
            "cp.degree=2 cp.method=spiral",
            r"cp.method=spiral is not one of its choices; legal: ring, ulysses, all_gather",
        ),
        ("cp.degree=2 cp.balance=zag", r"cp.balance=zag is not one of its choices; legal: none, zigzag, striped"),
        ("cp.degree=0", r"cp.degree=0 is out of range"),
    ],
)
def test_refused(words, told):
    with pytest.raises(ConfigError, match=told):
        load(TINY, words.split(), CHECKS)


@pytest.mark.parametrize(
    "words",
    [
        "cp.degree=3 data.sequence=66",
        "cp.degree=2 data.sequence=34 cp.balance=none",
        "data.sequence=31",
        "cp.degree=8 cp.method=ulysses",
        "cp.degree=4 tp.degree=2 cp.method=hybrid cp.ulysses=4",
    ],
)
def test_accepted(words):
    load(TINY, words.split(), CHECKS)
