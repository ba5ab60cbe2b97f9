"""Attention of this rank's queries to keys of all ranks, block by block.

B batch, L tokens of one rank, H heads, G kv heads, h head dim, v of values, S queries and T keys of a block
"""

import torch
from torch import Tensor

from research.models.partial_attention import attention_part, attention_part_gradients
from research.parallel.cp.plan import Block
from research.parallel.cp.transport import Transport


def blockwise_attention(q: Tensor, k: Tensor, v: Tensor, transport: Transport, scale: float, flash: bool) -> Tensor:
    """q (B, L, H, h), k (B, L, G, h), v (B, L, G, v) of this rank -> (B, L, H, v)"""
    y: Tensor = _Attention.apply(q, k, v, transport, scale, flash)
    return y


class _Attention(torch.autograd.Function):
    """
    forward    o (B, L, H, v) = parts of all blocks, merged by their log-sum-exp;  keys and values visit
    backward   of each block with the o and log-sum-exp of all;  keys and values visit again, dk and dv return
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, transport: Transport, scale: float, flash: bool) -> Tensor:  # type: ignore[no-untyped-def]
        wide = torch.promote_types(q.dtype, torch.float32)
        o = q.new_zeros(*q.shape[:3], v.shape[3], dtype=wide)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=wide)
        for blocks, keys, values in transport.visits(k, v):
            for block in blocks:
                of, to = (block.samples, block.queries), (block.samples, block.keys)
                given = _tiles(block, q[of], keys[to], values[to])
                parts = attention_part(*given, scale=scale, causal=block.kind != "full", flash=flash)
                merge(o[of], lse[of], *_untiled(block, *parts))
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.about = transport, scale, flash
        return o

    @staticmethod
    def backward(ctx, do: Tensor):  # type: ignore[no-untyped-def]
        q, k, v, o, lse = ctx.saved_tensors
        transport, scale, flash = ctx.about
        dq = torch.zeros_like(q, dtype=lse.dtype)
        dkv = k.new_zeros(*k.shape[:3], k.shape[3] + v.shape[3], dtype=lse.dtype)
        for blocks, keys, values, sums in transport.returns(k, v, dkv):
            for block in blocks:
                of, to = (block.samples, block.queries), (block.samples, block.keys)
                given = _tiles(block, do[of], q[of], keys[to], values[to], o[of], lse[of])
                parts = attention_part_gradients(*given, scale=scale, causal=block.kind != "full", flash=flash)
                dq_part, dk_part, dv_part = _untiled(block, *parts)
                dq[of] += dq_part
                sums[to][..., : k.shape[3]] += dk_part
                sums[to][..., k.shape[3] :] += dv_part
        dk, dv = dkv.to(k.dtype).split([k.shape[3], v.shape[3]], -1)
        return dq.to(q.dtype), dk, dv, None, None, None


def merge(o: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Take a part (B, S, H, v) with log-sum-exp (B, S, H) into what is there, in place: the mean of both outputs,
    weighted with the exponentials of their lse, of which none is computed that could overflow."""
    o.lerp_(part.to(o.dtype), torch.sigmoid(part_lse - lse)[..., None])
    lse.copy_(torch.logaddexp(lse, part_lse))


def _tiles(block: Block, *tensors: Tensor) -> list[Tensor]:
    """(B, tiles * S, ..) of a block -> (B * tiles, S, ..), turned round where that makes it causal."""
    if block.tiles > 1:
        tensors = tuple(t.unflatten(1, (block.tiles, -1)).flatten(0, 1) for t in tensors)
    return [t.flip(1) if block.kind == "reversed" else t for t in tensors]


def _untiled(block: Block, *tensors: Tensor) -> list[Tensor]:
    """The inverse of `_tiles`."""
    turned = [t.flip(1) if block.kind == "reversed" else t for t in tensors]
    return [t.unflatten(0, (-1, block.tiles)).flatten(1, 2) for t in turned] if block.tiles > 1 else turned
