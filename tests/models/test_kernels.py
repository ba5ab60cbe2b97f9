"""Products and permutations against plain loops, forward and backward."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from research.models import seams
from research.models.kernels import collect, spread, spread_beside
from research.models.pointwise import swiglu, weighted_swiglu
from research.models.products import Products


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


@pytest.mark.parametrize("ids", [[[2, 0], [1, 2], [0, 1]], [[3, 0], [3, 3], [0, 1]], [[3, 3]], [[1]]])
def test_spread_and_collect_are_adjoint(ids):
    """An id of 3 is dropped."""
    at = seams.by_expert(torch.tensor(ids), 3, drops=True)
    where = at.index, at.places, at.starts
    x = torch.randn(len(ids), 4, dtype=torch.float64, requires_grad=True)
    y = torch.randn(len(at.index), 4, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(spread(x, *where), x[at.index])
    torch.testing.assert_close((spread(x, *where) * y).sum(), (x * collect(y, *where)).sum())
    if len(y):
        assert torch.autograd.gradcheck(lambda t: spread(t, *where), (x,))
        assert torch.autograd.gradcheck(lambda t: collect(t, *where), (y,))
        beside = y[:, 0].detach().requires_grad_()
        torch.testing.assert_close(spread_beside(x, beside, *where), torch.cat([x[at.index], beside[:, None]], 1))
        assert torch.autograd.gradcheck(lambda *t: spread_beside(*t, *where), (x, beside))


def routing(tokens, top_k, experts, dim, dropped=0):
    """x, ids, weights, and one matrix for each expert; the first choices are dropped."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, dim, generator=generator, dtype=torch.float64, requires_grad=True)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
    ids.view(-1)[:dropped] = experts
    weights = torch.rand(tokens, top_k, generator=generator, dtype=torch.float64, requires_grad=True)
    w = torch.randn(experts, dim, dim, generator=generator, dtype=torch.float64, requires_grad=True)
    return x, ids, weights, w


@pytest.mark.parametrize("tokens, dropped", [(7, 0), (7, 4), (1, 0), (1, 3), (7, 21)])
def test_experts_equal_a_loop_over_tokens(tokens, dropped):
    x, ids, weights, w = routing(tokens, 3, 5, 4, dropped)

    def routed(rows, counts, weights):
        return Products().grouped(rows, w, counts) * weights[:, None]

    y, shared = seams.experts(x, ids, weights, 5, routed, lambda: None, drops=dropped > 0)
    want = torch.zeros_like(x)
    for t, k in itertools.product(range(tokens), range(3)):
        if ids[t, k] < 5:
            want[t] += weights[t, k] * w[ids[t, k]] @ x[t]
    torch.testing.assert_close(y, want)
    assert shared is None
    assert torch.equal(seams.count(ids, 6), torch.bincount(ids.flatten(), minlength=6))
    if want.requires_grad:
        sides = [torch.autograd.grad(o.square().sum(), (x, weights, w)) for o in (y, want)]
        for got, right in zip(*sides, strict=True):
            torch.testing.assert_close(got, right)


def test_routing_weights_inside_the_experts_save_their_output():
    """The plain way weighs outputs, so that its backward needs them: T*K*D elements that this one does not keep, but
    the weights of rows. Equal gradients."""
    tokens, top_k, experts, dim, width = 20, 3, 5, 16, 24
    x, ids, weights, _ = routing(tokens, top_k, experts, dim)
    shapes = [(experts, width, dim), (experts, width, dim), (experts, dim, width)]
    gate, up, down = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    product = Products().grouped

    def inside(rows, counts, weights):
        return product(weighted_swiglu(product(rows, gate, counts), product(rows, up, counts), weights), down, counts)

    def behind(rows, counts, weights):
        return product(swiglu(product(rows, gate, counts), product(rows, up, counts)), down, counts) * weights[:, None]

    sides = []
    for routed in (inside, behind):
        saved = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=saved: s.setdefault(id(t), t), lambda t: t):
            y, _ = seams.experts(x, ids, weights, experts, routed, lambda: None)
        gradients = torch.autograd.grad(y.square().sum(), (x, weights, gate, down))
        sides.append((sum(t.nbytes for t in saved.values()), gradients))
    (ours, got), (plain, want) = sides
    assert plain - ours == tokens * top_k * dim * 8
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_a_seam_has_one_owner():
    one = seams.one_device(Products())
    with pytest.raises(ValueError, match="'attend' is claimed by both cp and tp"):
        seams.wire(one, {"cp": {"attend": seams.attend}, "tp": {"attend": seams.attend}})
    with pytest.raises(ValueError, match="tp claims seam 'atend'; legal: assemble, attend"):
        seams.wire(one, {"tp": {"atend": seams.attend}})
    wrapped = seams.wire(one, {}, [{"count": lambda inner: lambda ids, n: inner(ids, n) * 2}])
    assert wrapped.count(torch.tensor([[0]]), 2).tolist() == [2, 0]
