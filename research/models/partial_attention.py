"""Attention to some of the keys, and what it takes to put such parts together: flash kernels with their log-sum-exp.

The softmax of a part is over its own keys. With lse, the log of the sum of exponentials of each query's scores, parts
merge exactly; and the backward of a part needs no more than the output and the lse over all keys.

B batch, S queries, T keys, H heads, G kv heads, h head dim of queries and keys, v of values, w the larger of the two
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from research.models.kernels import flash_attn_backward, flash_attn_forward

SCORES = 2**24  # elements that `_plain` makes at once


def attention_part(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, flash: bool = False
) -> tuple[Tensor, Tensor]:
    """q (B, S, H, h), k (B, T, G, h), v (B, T, G, v) -> output (B, S, H, v) and lse (B, S, H), float32 at least. Where
    it is causal, S = T and query i sees the keys up to i. Every query sees a key."""
    forward = _kernel(q, flash).forward
    o, lse = forward(*_as_wide(q, k, v), scale, causal)
    return o.transpose(1, 2)[..., : v.shape[-1]], lse.transpose(1, 2)


def attention_part_gradients(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    scale: float,
    causal: bool,
    flash: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The parts of dq, dk and dv that flow through these keys; do, o and lse are those of all keys."""
    backward = _kernel(q, flash).backward
    wide_q, wide_k, wide_v, wide_o, wide_do = _as_wide(q, k, v, o, do)
    gradients = backward(wide_do, wide_q, wide_k, wide_v, wide_o, lse.transpose(1, 2), scale, causal)
    dq, dk, dv = (g.transpose(1, 2)[..., : t.shape[-1]] for g, t in zip(gradients, (q, k, v), strict=True))
    return dq, dk, dv


class _Kernel(NamedTuple):
    """Functions of (B, H, S, w) tensors; a query head reads kv head i * G // H."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _kernel(q: Tensor, flash: bool) -> _Kernel:
    if flash:
        return _Kernel(flash_attn_forward, flash_attn_backward)
    if q.device.type != "cuda":
        return _Kernel(_cpu, _cpu_backward)
    return (
        _Kernel(_cuda, _cuda_backward)
        if q.dtype in (torch.bfloat16, torch.float16)
        else _Kernel(_plain, _plain_backward)
    )


def _as_wide(*tensors: Tensor) -> list[Tensor]:
    """(B, S, H, n) of several n -> (B, H, S, w), w a multiple of 8 on CUDA: what kernels take. Zeros change nothing."""
    width = max(t.shape[-1] for t in tensors)
    if tensors[0].device.type == "cuda":
        width = math.ceil(width / 8) * 8
    padded = (t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1])) for t in tensors)
    return [t.transpose(1, 2) for t in padded]


def _cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    o, lse = op(q, k, v, 0.0, causal, scale=scale)
    return o, lse


def _cpu_backward(do, q, k, v, o, lse, scale, causal):  # type: ignore[no-untyped-def]
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return op(do, q, k, v, o, lse, 0.0, causal, scale=scale)


def _cuda(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return o, lse


def _cuda_backward(do, q, k, v, o, lse, scale, causal):  # type: ignore[no-untyped-def]
    op = torch.ops.aten._scaled_dot_product_flash_attention_backward
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # state of a dropout that there is not
    lengths = None, None, q.shape[2], k.shape[2]
    return op(do, q, k, v, o, lse.contiguous(), *lengths, 0.0, causal, unused, unused[0], scale=scale)


def _plain(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Some queries at a time, by products: float32 and float64, which the CUDA kernels refuse."""
    outputs, sums = [], []
    k, v = (t[:, :, None] for t in (k, v))
    for rows in _rows(q, k):
        scores = _scores(q, k, scale, causal, rows)
        lse = scores.logsumexp(-1)
        outputs.append(((scores - lse[..., None]).exp() @ v).flatten(1, 2))
        sums.append(lse.flatten(1, 2))
    return torch.cat(outputs, 2), torch.cat(sums, 2)


def _plain_backward(do, q, k, v, o, lse, scale, causal):  # type: ignore[no-untyped-def]
    """ds = p (do v^T - rowsum(do o)), the gradient of scores (FlashAttention-2, algorithm 2)."""
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    heads = k.shape[1], -1
    k, v = (t[:, :, None] for t in (k, v))
    for rows in _rows(q, k):
        some_q, some_do, some_o, some_lse = (t[:, :, rows].unflatten(1, heads) for t in (q, do, o, lse))
        p = (_scores(q, k, scale, causal, rows) - some_lse[..., None]).exp()
        ds = p * (some_do @ v.mT - (some_do * some_o).sum(-1, keepdim=True)) * scale
        dq[:, :, rows] = (ds @ k).flatten(1, 2)
        dk += (ds.mT @ some_q).sum(2)
        dv += (p.mT @ some_do).sum(2)
    return dq, dk, dv


def _rows(q: Tensor, k: Tensor) -> list[slice]:
    each = max(1, SCORES // (q.shape[0] * q.shape[1] * k.shape[-2]))
    return [slice(i, min(i + each, q.shape[2])) for i in range(0, q.shape[2], each)]


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, rows: slice) -> Tensor:
    """Of some queries, (B, G, H/G, rows, T)."""
    scores = q[:, :, rows].unflatten(1, (k.shape[1], -1)) @ k.mT * scale
    if causal:
        place = torch.arange(k.shape[-2], device=q.device)
        scores = scores.masked_fill(place > place[rows, None], -torch.inf)
    return scores
