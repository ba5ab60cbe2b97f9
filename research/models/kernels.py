"""The arithmetic that is worth more than one line of torch: products, attention, permutation of rows."""

import torch
import torch.nn.functional as F
from torch import Tensor


class Products:
    """The matrix products with a weight. One object for a model, so that what they do can be changed in one place."""

    def linear(self, x: Tensor, w: Tensor) -> Tensor:
        """x (.., I), w (O, I) -> (.., O)"""
        return F.linear(x, w)

    def grouped(self, rows: Tensor, w: Tensor, counts: Tensor) -> Tensor:
        """rows (N, I) sorted by expert, w (E, O, I), counts (E,) with sum N -> (N, O): each expert's product with its
        own rows. One kernel, no host sync; float64, which that kernel refuses, loops over the experts."""
        if rows.dtype == torch.float64:
            parts = zip(rows.split(counts.tolist()), w, strict=True)
            return torch.cat([F.linear(r, e) for r, e in parts])
        return F.grouped_mm(rows, w.transpose(-2, -1), offs=counts.cumsum(0, dtype=torch.int32))


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As `causal_attention`, by the flash-attn package: CUDA, bfloat16."""
    from flash_attn import flash_attn_func  # an extra that exists with CUDA only

    o: Tensor = flash_attn_func(q, k, v, causal=True)
    return o


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, S, H, h), twice (B, S, G, h) -> (B, S, H, h), scaled by h**-0.5; query head i reads kv head i * G // H."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return o.transpose(1, 2)


def permute(x: Tensor, index: Tensor, back: Tensor, copies: int) -> Tensor:
    """x (T, D) -> x[index] (N, D), where each row of x appears `copies` times and `back` (N,) finds the copies again.

    Both directions only read by index (deterministic, no atomics), unlike the backward of plain indexing.
    """
    y: Tensor = _Permute.apply(x, index, back, copies)
    return y


class _Permute(torch.autograd.Function):
    """
    forward   (T, D) -> (N, D)   y = x[index]
    backward  (N, D) -> (T, D)   dx = sum over copies of dy[back]
    """

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, back: Tensor, copies: int) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(back)
        ctx.copies = copies
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
        (back,) = ctx.saved_tensors
        dx = dy.index_select(0, back)
        return dx if ctx.copies == 1 else dx.unflatten(0, (-1, ctx.copies)).sum(1), None, None, None
