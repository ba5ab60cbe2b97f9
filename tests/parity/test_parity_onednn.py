"""Float32 steps whose products are all oneDNN's against a float64 step of one process: proofs in float64 have none."""

from collections.abc import Callable

import pytest
import torch

from experiments.command import CHECKS
from research import settings
from research.config import replace
from research.models import products
from research.parallel.tp import products as over_ranks
from research.train.proof import compare, reference_of, snapshots

LIMIT_S = 60.0
ROUNDING = 1e-5  # of float32 sums, relative; torch's own products come to 4e-7

pytestmark = pytest.mark.skipif(products.ONEDNN is None, reason="a torch without oneDNN")


@pytest.fixture
def error(monkeypatch, tmp_path) -> Callable[[str], float]:
    """The largest of any gradient, loss and norm of one step of a layout."""
    monkeypatch.setattr(products, "SMALL", 1)

    def of(words: str) -> float:
        config = settings.load("experiments/configs/tiny.yaml", ["train.steps=1", *words.split()], CHECKS)
        wide = replace(reference_of(config), {"train.dtype": "float64"})
        (one,) = snapshots(wide, tmp_path / "one", LIMIT_S)
        narrow = replace(config, {"train.dtype": "float32"})
        findings = compare(one, snapshots(narrow, tmp_path / "layout", LIMIT_S))
        return max(f.error for f in findings if f.what != "weight")

    return of


WORDS = [
    "train.recompute=selective",
    "tp.degree=2 tp.overlap=2",
    "tp.degree=2 tp.sequence=false",
    "pp.degree=2 pp.schedule=zb_h1 train.microbatches=2",
]


@pytest.mark.parametrize("words", WORDS)
def test_float32_steps_by_onednn(error, words):
    assert 1e-9 < error(words) < ROUNDING


def test_planted_sum_that_is_lost(error, monkeypatch):
    monkeypatch.setattr(over_ranks, "add_linear", lambda y, x, w: None)
    assert error("tp.degree=2") > 1e-2


def test_planted_gradient_of_the_wrong_tokens(error, monkeypatch):
    def late(dy: torch.Tensor, x: torch.Tensor, real=products.weight_gradient) -> torch.Tensor:
        return real(dy, x.roll(1, -2) if x.dtype == torch.float32 else x)

    monkeypatch.setattr(products, "weight_gradient", late)
    assert error("train.recompute=none") > 1e-2


def test_no_gradient_is_lost_silently():
    """oneDNN's product has none, torch's has: what is asked of one must be asked of both."""
    x = torch.ones(4, 8, requires_grad=True)
    with pytest.raises(AssertionError):
        products.linear(x, torch.ones(4, 8))
