"""Heads for tokens and back: each rank then attends to all tokens with some of the heads (Jacobs et al. 2023).

B batch, s tokens of one rank, u ranks, H heads, G kv heads, h head dim, v of values
"""

import math

import torch
from torch import Tensor

from research import comm
from research.config import CpConfig
from research.mesh import Group


def inner_degree(cp: CpConfig) -> int:
    """Ranks that exchange heads for tokens."""
    return {"ulysses": cp.degree, "hybrid": cp.ulysses}.get(cp.method, 1)


def copies(kv_heads: int, u: int) -> int:
    """How often each kv head is repeated until u ranks have as many each, and those that their query heads read."""
    return u // math.gcd(u, kv_heads)


def heads_for_tokens(q: Tensor, k: Tensor, v: Tensor, group: Group) -> list[Tensor]:
    """q (B, s, H, h), k (B, s, G, h), v (B, s, G, v) -> the same of u*s tokens and 1/u of the heads, by one all-to-all.
    Where fewer kv heads than ranks, or a number that does not divide, each is repeated until every rank gets those that
    its query heads read."""
    u = group.size
    if u == 1:
        return [q, k, v]
    k, v = (t.repeat_interleave(copies(k.shape[2], u), 2) for t in (k, v))
    parts = [t.unflatten(2, (u, -1)) for t in (q, k, v)]  # (B, s, u, heads, width)
    given = torch.cat([t.flatten(3) for t in parts], -1).movedim(2, 0)
    taken = comm.joined(comm.all_to_all(given, group, "heads for tokens"), 1)
    sizes = [t.shape[3] * t.shape[4] for t in parts]
    return [t.unflatten(2, p.shape[3:]) for t, p in zip(taken.split(sizes, -1), parts, strict=True)]


def tokens_for_heads(o: Tensor, group: Group) -> Tensor:
    """(B, u*s, H/u, v) -> (B, s, H, v)"""
    if group.size == 1:
        return o
    taken = comm.all_to_all(comm.parted(o, group.size, 1), group, "tokens for heads")  # (u, B, s, H/u, v)
    return taken.movedim(0, 2).flatten(2, 3)
