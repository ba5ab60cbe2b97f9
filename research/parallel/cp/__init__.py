"""Context parallelism: ring, Ulysses, all-gather and their hybrid. See README.md beside this file.

B batch, S tokens of a sample, n cp ranks = u inner (Ulysses) * n/u outer ones (ring), s = S/n tokens of one rank,
H heads, G kv heads, h head dim, v of values
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from research.config import RunConfig, degrees
from research.mesh import Group, Mesh
from research.models.batch import Batch
from research.models.products import Products
from research.models.seams import Seam
from research.parallel.cp.attention import blockwise_attention
from research.parallel.cp.plan import Plan, held, make_plan, positions
from research.parallel.cp.transport import Gather, Ring
from research.parallel.cp.ulysses import heads_for_tokens, inner_degree, tokens_for_heads
from research.problems import Problem, divisors


class ContextParallel:
    """Each rank holds some tokens of each sample, and all that is done to one token at a time; `attend` alone needs
    those of other ranks. A parameter's gradient is the sum over all tokens, so over its replicas, as ever."""

    name = "cp"
    splits: Mapping[str, str] = {}

    def problems(self, config: RunConfig) -> Iterator[Problem]:
        cp, sequence = config.cp, config.data.sequence
        if cp.method != "hybrid" and cp.ulysses != 1:
            yield Problem("cp.ulysses", cp.ulysses, f"is no part of cp.method={cp.method}", "1, or cp.method=hybrid")
        if cp.method == "hybrid" and cp.degree % cp.ulysses:
            yield Problem("cp.ulysses", cp.ulysses, f"must divide cp.degree={cp.degree}", divisors(cp.degree))
        halved = cp.balance == "zigzag" and cp.degree > inner_degree(cp)  # each of the outer ranks holds two runs
        parts = 2 * cp.degree if halved else cp.degree
        if cp.degree > 1 and sequence % parts:
            rule = f"must be a multiple of {parts}"
            rule += f" ({'2*' if halved else ''}cp.degree, with cp.method={cp.method} and cp.balance={cp.balance})"
            below = sequence // parts * parts
            legal = ", ".join(str(n) for n in (below, below + parts) if n)
            yield Problem("data.sequence", sequence, rule, f"{legal}, ..")
        inner, heads = inner_degree(cp), config.model.heads // degrees(config)["tp"]
        if heads % inner:
            key = "cp.ulysses" if cp.method == "hybrid" else "cp.degree"
            rule = f"must divide the {heads} heads of each rank (model.heads/tp.degree), with cp.method={cp.method}"
            yield Problem(key, inner, rule, divisors(heads))

    def seams(self, config: RunConfig, mesh: Mesh, products: Products) -> Mapping[str, Seam]:
        if mesh.sizes["cp"] == 1:
            return {}
        inner, outer = mesh.nested("cp", inner_degree(config.cp))
        return {"attend": attend(config, inner, outer)}

    def wraps(self, config: RunConfig, mesh: Mesh) -> Mapping[str, Callable[[Seam], Seam]]:
        return {}

    def cut_batch(self, batch: Batch, config: RunConfig, mesh: Mesh) -> Batch:
        """The tokens of this rank, in order of position."""
        if mesh.sizes["cp"] == 1:
            return batch
        inner = inner_degree(config.cp)
        outer, within = divmod(mesh.at["cp"], inner)
        runs = held(config.cp.balance, batch.tokens.shape[1], mesh.sizes["cp"] // inner, outer)
        mine = torch.from_numpy(positions(runs)).chunk(inner)[within]
        cut = batch.map(lambda t: t.index_select(1, mine))
        return dataclasses.replace(cut, starts=starts(batch.documents))


def starts(documents: Tensor) -> Tensor:
    """documents (B, S) -> the position at which the document of each token begins (B, S)"""
    place = torch.arange(documents.shape[1])
    begins = documents.diff(dim=1, prepend=documents[:, :1] - 1) != 0
    return place.where(begins, 0).cummax(1).values


def attend(config: RunConfig, inner: Group, outer: Group) -> Seam:
    """Inner ranks give heads for tokens, then outer ones exchange keys and values of those heads, and back."""
    balance, flash = config.cp.balance, config.train.kernel == "flash"
    transport = Gather if config.cp.method == "all_gather" else Ring
    plans: MutableMapping[Tensor, dict[int, Plan]] = WeakTensorKeyDictionary()  # by documents of a batch, and window

    def plan(length: int, window: int, begins: Tensor | None) -> Plan:
        if begins is None:
            return make_plan(outer.size, outer.rank, balance, length, window)
        known = plans.setdefault(begins, {})
        if window not in known:
            known[window] = make_plan(outer.size, outer.rank, balance, length, window, begins.numpy())
        return known[window]

    def attention_of_all(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        *,
        scale: float,
        window: int = 0,
        documents: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        length = q.shape[1] * inner.size * outer.size
        by_batch = plan(length, window, None if documents is None else starts)
        q, k, v = heads_for_tokens(q, k, v, inner)
        return tokens_for_heads(blockwise_attention(q, k, v, transport(by_batch, outer), scale, flash), inner)

    return attention_of_all
