"""ZeRO refuses what it cannot do, by key, value, rule and legal values."""

import pytest

from experiments.command import CHECKS
from research import settings
from research.config import DpConfig, RunConfig, TpConfig
from research.parallel.dp import DataParallel
from research.problems import ConfigError

TINY = "experiments/configs/tiny.yaml"


@pytest.mark.parametrize(
    "words, told",
    [
        ("dp.zero=4", "dp.zero=4 is not one of its choices; legal: 0, 1, 2, 3"),
        ("dp.replicas=2 dp.degree=2", "dp.replicas=2 has nothing to replicate with dp.zero=0; legal: 1"),
        ("dp.replicas=0 dp.zero=1", "dp.replicas=0 is out of range"),
        ("dp.replicas=3 dp.zero=1 dp.degree=4", "dp.replicas=3 must divide dp.degree=4; legal: 1, 2, 4"),
        ("dp.keep_gathered=true dp.zero=2", "dp.keep_gathered=true has nothing to keep with dp.zero=2; legal: false"),
        ("dp.grad_dtype=float16", "dp.grad_dtype=float16 is not one of its choices; legal: float32, bfloat16"),
        ("dp.grad_dtype=bfloat16", "dp.grad_dtype=bfloat16 is too coarse for train.dtype=float64; legal: float32"),
    ],
)
def test_refused(words, told):
    with pytest.raises(ConfigError) as error:
        settings.load(TINY, words.split(), CHECKS)
    assert told in str(error.value)


def test_experts_that_do_not_fit_a_replica():
    """Of 6 ranks each half has 3: two copies of an expert on one side, one on the other."""

    class Experts(TpConfig):
        tensor = 1

    config = RunConfig(dp=DpConfig(degree=6, zero=1, replicas=2))
    object.__setattr__(config, "ep", Experts(degree=2))
    (problem,) = (p for p in DataParallel().problems(config) if p.key == "dp.replicas")
    assert "leaves 3 ranks in a replica" in str(problem) and "ep.degree*ep.tensor=2" in str(problem)


@pytest.mark.parametrize("words", ["dp.zero=1 dp.replicas=4", "dp.zero=3 dp.keep_gathered=true dp.replicas=2"])
def test_accepted(words):
    settings.load(TINY, ["dp.degree=4", *words.split()], CHECKS)
