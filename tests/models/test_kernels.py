"""Products and permutations against plain loops, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from research.models import seams
from research.models.kernels import Products, permute


def loop(rows, w, counts):
    return torch.cat([F.linear(r, e) for r, e in zip(rows.split(counts.tolist()), w, strict=True)])


@pytest.mark.parametrize("counts", [[3, 5, 2], [0, 10, 0], [10, 0, 0], [0, 0, 10], [1, 0, 9], [0, 0, 0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("width", [16, 24, 30, 5])
def test_grouped_equals_a_loop(counts, dtype, width):
    generator = torch.Generator().manual_seed(1)
    counts = torch.tensor(counts)
    rows = torch.randn(int(counts.sum()), 32, generator=generator).to(dtype)
    w = torch.randn(3, width, 32, generator=generator).to(dtype)
    dy = torch.randn(len(rows), width, generator=generator).to(dtype)
    sides = []
    for product in (Products().grouped, loop):
        leaves = [rows.clone().requires_grad_(), w.clone().requires_grad_()]
        y = product(*leaves, counts)
        y.backward(dy)
        sides.append([y.detach(), *(leaf.grad for leaf in leaves)])
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float64: 1e-14}[dtype]
    for got, want in zip(*sides, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_permute_gradient():
    ids = torch.tensor([[2, 0], [1, 2], [0, 1]])
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    order = ids.flatten().argsort(stable=True)
    back = seams.inverse(order)
    torch.testing.assert_close(permute(x, order // 2, back, 2), x[order // 2])
    assert torch.autograd.gradcheck(lambda t: permute(t, order // 2, back, 2), (x,))
    y = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: permute(t, back, order, 1), (y,))


def test_experts_equal_a_loop_over_tokens():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    ids = torch.stack([torch.randperm(5, generator=generator)[:3] for _ in range(7)])
    weights = torch.rand(7, 3, generator=generator, dtype=torch.float64)
    w = torch.randn(5, 4, 4, generator=generator, dtype=torch.float64)
    y, shared = seams.experts(x, ids, weights, 5, lambda r, n: Products().grouped(r, w, n), lambda: None)
    want = [sum(a * w[e] @ t for a, e in zip(k, i, strict=True)) for t, i, k in zip(x, ids, weights, strict=True)]
    torch.testing.assert_close(y, torch.stack(want))
    assert shared is None
    assert torch.equal(seams.count(ids, 5), torch.bincount(ids.flatten(), minlength=5))


def test_a_seam_has_one_owner():
    one = seams.one_device(Products())
    with pytest.raises(ValueError, match="'attend' is claimed by both cp and tp"):
        seams.wire(one, {"cp": {"attend": seams.attend}, "tp": {"attend": seams.attend}})
    with pytest.raises(ValueError, match="tp claims seam 'atend'; legal: assemble, attend"):
        seams.wire(one, {"tp": {"atend": seams.attend}})
    wrapped = seams.wire(one, {}, [{"count": lambda inner: lambda ids, n: inner(ids, n) * 2}])
    assert wrapped.count(torch.tensor([[0]]), 2).tolist() == [2, 0]
