"""The loss of a few tokens at a time: what it holds of logits, and how exact it is, on one rank and on several."""

from collections import deque
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from research import comm
from research.config import LaunchConfig
from research.launch.local import start
from research.ledger import Ledger
from research.mesh import Mesh
from research.models import kernels
from research.parallel import tp
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


def sides(dtype, peak, place, device):
    """Nine rows over ranks that hold 12 together, the largest logit as given: this rank's loss and gradients, and
    those of torch."""
    generator = torch.Generator().manual_seed(0)
    x, head = (torch.randn(n, 8, generator=generator, dtype=dtype) for n in (20, 12))
    x *= peak / (x @ head[:9].T).max()
    targets = torch.randint(-1, 9, (20,), generator=generator)
    group = Mesh({"tp": place.world}, place.rank).group("tp")
    x = x[None].requires_grad_()
    mine = head.chunk(place.world)[place.rank].clone().requires_grad_()
    loss = tp.cross_entropy(group, 9, False)(x, mine, targets[None])
    whole = head[:9].clone().requires_grad_()
    want = F.cross_entropy(x[0] @ whole.T, targets, ignore_index=-1, reduction="sum")
    ours, torchs = torch.autograd.grad(loss, (x, mine)), torch.autograd.grad(want, (x, whole))
    return (loss.detach(), *ours), (want.detach(), *torchs)


def require_equal(world, dtype, peak, rtol):
    ranks = start(partial(sides, dtype, peak), world, LaunchConfig(threads=1), 60.0)
    losses, dxs, dheads = zip(*(ours for ours, _ in ranks), strict=True)
    loss, dx, dhead = ranks[0][1]
    close = partial(torch.testing.assert_close, rtol=rtol)
    close(sum(losses), loss, atol=0)
    close(sum(dxs), dx, atol=rtol * float(dx.abs().max()))
    close(torch.cat(dheads)[:9], dhead, atol=rtol * float(dhead.abs().max()))
    assert not torch.cat(dheads)[9:].any()


@pytest.mark.parametrize("world", [1, 2, 4])  # of four, the last one holds padding alone
def test_loss_and_gradients_equal_torchs(monkeypatch, world):
    """Four tokens at a time."""
    monkeypatch.setattr(kernels, "CHUNK", 9)
    require_equal(world, torch.float64, 10, 1e-12)


@pytest.mark.parametrize("world", [1, 2])
def test_large_logits_in_float32(world):
    """Float32 does not reach the exponential of 150. It rounds such a logit by 1e-5, and so each probability."""
    require_equal(world, torch.float32, 150, 1e-4)


@pytest.mark.parametrize("world", [1, 2])
def test_planted_softmax_without_its_maximum(monkeypatch, world):
    real = comm.all_reduce_
    monkeypatch.setattr(comm, "all_reduce_", lambda t, *to: torch.zeros_like(t) if comm.MAX in to else real(t, *to))
    require_equal(world, torch.float64, 10, 1e-12)
    with pytest.raises(AssertionError, match="got inf"):
        require_equal(world, torch.float32, 150, 1e-4)


def error_of_bfloat16():
    """Relative, of the gradient of a head of 64 rows, which adds up over 512 times 16 tokens."""
    generator = torch.Generator().manual_seed(0)
    x, head = (torch.randn(n, 32, generator=generator).bfloat16() for n in (512 * 16, 64))
    targets = torch.randint(64, (len(x),), generator=generator)
    found, exact = head.clone().requires_grad_(), head.double().requires_grad_()
    kernels.cross_entropy(x, found, targets).backward()
    F.cross_entropy(x.double() @ exact.T, targets, reduction="sum").backward()
    return float((found.grad.double() - exact.grad).norm() / exact.grad.norm())


ROUNDED = 2**-8  # the most that one rounding to bfloat16 puts off by


def test_the_gradient_of_the_head_adds_up_in_float32(monkeypatch):
    monkeypatch.setattr(kernels, "CHUNK", 16 * 64)
    assert error_of_bfloat16() < ROUNDED


def test_planted_sum_in_bfloat16(monkeypatch):
    """A chunk's gradient is what it adds to a sum in bfloat16."""
    total, real = torch.zeros(64, 32, dtype=torch.bfloat16), kernels.weight_gradient

    def added(dy, x):
        before = total.float()
        return total.add_(real(dy, x)).float() - before

    monkeypatch.setattr(kernels, "weight_gradient", added)
    monkeypatch.setattr(kernels, "CHUNK", 16 * 64)
    assert error_of_bfloat16() > 4 * ROUNDED
