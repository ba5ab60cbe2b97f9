"""The loss of a few tokens at a time: what it holds of logits, and how exact it is."""

from collections import deque

import pytest
import torch

from research.ledger import Ledger
from research.models import kernels
from research.train.memory import MemoryMeter

N, V = 256, 4096  # tokens, rows of the head


def excess(dim, tokens, dtype, wanted=True):
    """Peak bytes of the loss and its gradients, over those that it should take with so many tokens at a time."""
    x, head = (torch.randn(n, dim, dtype=dtype, requires_grad=wanted) for n in (N, V))
    targets = torch.randint(-1, V, (N,))
    with torch.set_grad_enabled(wanted), MemoryMeter({"given": [x, head, targets]}, Ledger()) as meter:
        kernels.cross_entropy(x, head, targets)
    narrow = dtype.itemsize
    logits, rounded = tokens * V * 4, tokens * V * narrow if narrow < 4 else 0
    dx, dhead, addend = N * dim * narrow * wanted, V * dim * 4 * wanted, V * dim * narrow * wanted
    most = dx + dhead + max(logits + rounded, (rounded or logits) + addend)
    return meter.peak["activations"] / most - 1


CASES = [  # width, logits at a time, tokens that these are
    (2, 16 * V, 16),
    (2, 100 * V, 100),  # the last time fewer
    (64, 1, 32),  # as many as make the logits half of the gradient of the head
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim, logits, tokens", CASES)
@pytest.mark.parametrize("wanted", [True, False])
def test_logits_of_a_few_tokens_are_held(monkeypatch, dim, logits, tokens, dtype, wanted):
    monkeypatch.setattr(kernels, "CHUNK", logits)
    assert -0.01 < excess(dim, tokens, dtype, wanted) < 0.01


def test_planted_logits_of_all_tokens(monkeypatch):
    monkeypatch.setattr(kernels, "CHUNK", N * V)
    assert excess(2, 16, torch.float32) > 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_planted_logits_that_outlive_the_next(monkeypatch, dtype):
    held, real = deque(maxlen=2), kernels.linear  # of the last tokens: logits and the gradient of x

    def holding(x, w):
        held.append(real(x, w))
        return held[-1]

    monkeypatch.setattr(kernels, "linear", holding)
    monkeypatch.setattr(kernels, "CHUNK", 16 * V)
    assert excess(2, 16, dtype) > 0.2
