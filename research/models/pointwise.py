"""Work that reads and writes each element a few times: bound by memory, so each part keeps only what its backward
needs and allocates little. Products are in products.py, attention in kernels.py.

An output that can be made again from what is kept, or from an input that can be, has `again` (recipes.py).

T tokens, D normalised dim, F hidden width
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from research.models.recipes import recipe_of


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (.., D) / rms(x) * weight (D,), inside float32 at least. Keeps x as it is and 1/rms of each row.

    On CUDA by torch's own kernels. On a CPU torch composes the norm of parts, each of which keeps a float32 copy of x,
    and takes 7 times as long."""
    y: Tensor = _RMSNorm.apply(x, weight, eps)
    return y


class _RMSNorm(torch.autograd.Function):
    """r = 1 / sqrt(mean(x^2) + eps) of each row (Zhang and Sennrich 2019, eq. 4)

    forward   (T, D), (D,) -> (T, D)         y = x r w
    backward  (T, D) -> (T, D), (D,)         dx = r (dy w - x r^2 mean(dy w x)), dw = sum_t r dy x
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # type: ignore[no-untyped-def]
        y, r = _normed(x, weight, eps)
        ctx.save_for_backward(x, weight, r)

        def again(ctx: Any) -> Tensor:
            x, weight, _ = ctx.saved_tensors
            return _normed(x, weight, eps)[0]

        ctx.again = again
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
        kept_x, kept_weight, r = ctx.saved_tensors
        if dy.is_cuda:
            sizes = kept_weight.shape
            return *torch.ops.aten._fused_rms_norm_backward(dy, kept_x, sizes, r, kept_weight, [True, True]), None
        x, dy, weight, r = (t.to(r.dtype) for t in (kept_x, dy, kept_weight, r))
        product = x * dy
        mean = (product @ weight)[..., None].mul_(r.square()).div_(x.shape[-1])
        dw = product.flatten(0, -2).T.mv(r.flatten())
        dx = torch.mul(dy, weight, out=product).addcmul_(x, mean, value=-1).mul_(r)
        return dx.to(kept_x.dtype), dw.to(kept_weight.dtype), None


def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm, and r (.., 1)."""
    if x.is_cuda:
        y, r = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)
        return y, r
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    r = (norm.square_() / x.shape[-1] + eps).rsqrt_()
    return (x * r).mul_(weight).to(x.dtype), r


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020, eq. 6). Keeps its two inputs: silu(gate) is computed again."""
    y: Tensor = _SwiGLU.apply(gate, up)
    return y


class _SwiGLU(torch.autograd.Function):
    """
    forward   (T, F), (T, F) -> (T, F)       y = silu(g) u
    backward  (T, F) -> (T, F), (T, F)       dg = dy u silu'(g), du = dy silu(g)
    """

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate, up)
        ctx.again = lambda ctx: _product(*ctx.saved_tensors)
        return _product(gate, up)

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
        gate, up = ctx.saved_tensors
        dg = torch.ops.aten.silu_backward(dy * up, gate)
        return dg, F.silu(gate).mul_(dy)


def _product(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate).mul_(up)


def weighted_swiglu(gate: Tensor, up: Tensor, weights: Tensor) -> Tensor:
    """silu(gate) * up, row n times weights[n]. What comes after is linear, so a routing weight may stand here, and
    backward needs nothing but inputs: behind the last product it would need all of its output."""
    y: Tensor = _WeightedSwiGLU.apply(gate, up, weights)
    return y


class _WeightedSwiGLU(torch.autograd.Function):
    """
    forward   (N, F), (N, F), (N,) -> (N, F)         y = w silu(g) u
    backward  (N, F) -> (N, F), (N, F), (N,)         dw = sum_f dy silu(g) u; dg, du as of SwiGLU, of w dy
    """

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, weights: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate, up, weights)
        ctx.again = lambda ctx: _weighted_product(*ctx.saved_tensors)
        return _weighted_product(gate, up, weights)

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
        gate, up, weights = ctx.saved_tensors
        du = F.silu(gate)
        part = dy * up
        dw = torch.linalg.vecdot(part, du)
        dg = torch.ops.aten.silu_backward(part.mul_(weights[:, None]), gate)
        return dg, du.mul_(dy).mul_(weights[:, None]), dw


def _weighted_product(gate: Tensor, up: Tensor, weights: Tensor) -> Tensor:
    return _product(gate, up).mul_(weights[:, None])


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, S, H, h), cos and sin (B, S, 1, R/2) -> the same with its first R elements turned, i and i + R/2 as a pair
    (Su et al. 2021, eq. 34)."""
    y: Tensor = _Turn.apply(x, cos, sin)
    return y


class _Turn(torch.autograd.Function):
    """
    forward   (B, S, H, h) -> (B, S, H, h)   y = R(angle) x
    backward  (B, S, H, h) -> (B, S, H, h)   dx = R(-angle) dy
    """

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(cos, sin)
        if source := recipe_of(x):  # else x is not kept by anyone
            ctx.again = lambda ctx: _turned(source(), *ctx.saved_tensors)
        return _turned(x, cos, sin)

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
        cos, sin = ctx.saved_tensors
        return _turned(dy, cos, -sin), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sizes = [width, width, x.shape[-1] - 2 * width]
    (a, b, rest), (ya, yb, yrest) = x.split(sizes, -1), y.split(sizes, -1)
    torch.mul(a, cos, out=ya).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=yb).addcmul_(a, sin)
    yrest.copy_(rest)
    return y


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (..) in another dtype."""
    y: Tensor = _Cast.apply(x, dtype) if x.dtype != dtype else x
    return y


class _Cast(torch.autograd.Function):
    """
    forward   (..) -> (..)
    backward  (..) -> (..)   back to the dtype of x
    """

    @staticmethod
    def forward(ctx, x: Tensor, dtype: torch.dtype) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.dtype = x.dtype
        if source := recipe_of(x):
            ctx.again = lambda ctx: source().to(dtype)
        return x.to(dtype)

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
        return dy.to(ctx.dtype), None
