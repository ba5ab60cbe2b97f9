"""Norm, SwiGLU and rotation against torch's own autograd, and what each keeps."""

from math import prod

import pytest
import torch
import torch.nn.functional as F

from research.models import pointwise
from research.models.pointwise import rms_norm, swiglu, turn, weighted_swiglu

DTYPES = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 2e-2}


def tensor(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def norm_of_torch(x, weight):
    return F.rms_norm(x, weight.shape, weight, 1e-5)


def own_norm(x, weight):
    return rms_norm(x, weight, 1e-5)


def turn_by_parts(x, cos, sin):
    a, b, rest = x.split([cos.shape[-1], cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def sides(own, other, *shapes, dtype):
    """Output and gradients of both, of the same random inputs."""
    results = []
    for f in (own, other):
        leaves = [tensor(*shape, dtype=dtype, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
        y = f(*leaves)
        y.backward(tensor(*y.shape, dtype=dtype, seed=9))
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    return zip(*results, strict=True)


def kept(f, *inputs):
    """Bytes that autograd keeps for backward, each storage once; inputs that take gradients by their own size."""
    storages = {}

    def pack(t):
        storages[t.untyped_storage().data_ptr()] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        f(*inputs)
    return sum(storages.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 24), (2, 3, 4, 8), (7, 16), (0, 16)])
def test_norm(dtype, shape):
    for got, want in sides(own_norm, norm_of_torch, shape, shape[-1:], dtype=dtype):
        assert got.dtype == dtype
        torch.testing.assert_close(got, want, rtol=DTYPES[dtype], atol=DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype):
    for got, want in sides(swiglu, lambda g, u: F.silu(g) * u, (3, 5, 24), (3, 5, 24), dtype=dtype):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turned", [4, 8])  # a part of a head, and all of it
def test_turn(dtype, turned):
    angle = tensor(2, 3, 1, turned // 2, seed=5)
    cos, sin = angle.cos().to(dtype) * 1.2, angle.sin().to(dtype) * 1.2  # grown, as by YaRN
    pairs = sides(lambda x: turn(x, cos, sin), lambda x: turn_by_parts(x, cos, sin), (2, 3, 4, 8), dtype=dtype)
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=DTYPES[dtype], atol=DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [5, 1, 0])
def test_weighted_swiglu(dtype, rows):
    shapes = (rows, 24), (rows, 24), (rows,)
    pairs = sides(weighted_swiglu, lambda g, u, w: F.silu(g) * u * w[:, None], *shapes, dtype=dtype)
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=2 * DTYPES[dtype], atol=2 * DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_keeps_its_input_and_one_number_a_token(dtype):
    x, weight = tensor(4, 8, 64, dtype=dtype).requires_grad_(), tensor(64, dtype=dtype).requires_grad_()
    inverse_rms = 4 * 8 * (8 if dtype == torch.float64 else 4)
    want = (x.numel() + weight.numel()) * x.element_size() + inverse_rms
    assert kept(own_norm, x, weight) == want
    assert kept(norm_of_torch, x, weight) >= want + x.numel() * 4  # torch's own, on a CPU: why there is ours


def test_the_others_keep_no_intermediate():
    x = tensor(4, 8, 64, dtype=torch.bfloat16).requires_grad_()
    assert kept(lambda t: swiglu(t * 2, t * 3), x) == 2 * x.numel() * 2  # gate and up
    q, angle = tensor(2, 6, 4, 8).requires_grad_(), tensor(2, 6, 1, 4)
    assert kept(lambda t: turn(t, angle.cos(), angle.sin()), q) == 2 * prod(angle.shape) * 8


def test_planted_wrong_backward(monkeypatch):
    """A norm whose gradient forgets that rms depends on x."""

    def forgets(ctx, dy):
        x, weight, r = ctx.saved_tensors
        return dy * weight * r, (dy * x * r).sum(0), None

    monkeypatch.setattr(pointwise._RMSNorm, "backward", staticmethod(forgets))
    with pytest.raises(AssertionError):
        test_norm(torch.float64, (7, 16))
