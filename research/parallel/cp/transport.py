"""How keys and values reach the queries of other ranks, and how their gradients come back.

A way of transport yields the blocks that a rank can compute, with their keys and values, as soon as these are there;
the next ones travel meanwhile. In backward it yields gradients to add to as well.

B batch, L tokens of one rank, G kv heads, h head dim, v of values, n ranks
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from research import comm
from research.mesh import Group
from research.parallel.cp.plan import Block, Plan, Route

Visit = tuple[Sequence[Block], Tensor, Tensor]  # blocks, keys (B, .., G, h), values (B, .., G, v)
Return = tuple[Sequence[Block], Tensor, Tensor, Tensor]  # the same, and gradients of both (B, .., G, h+v)


class Transport(Protocol):
    plan: Plan

    def visits(self, k: Tensor, v: Tensor) -> Iterator[Visit]: ...

    def returns(self, k: Tensor, v: Tensor, dkv: Tensor) -> Iterator[Return]:
        """dkv (B, L, G, h+v): this rank's own, complete once the iterator has ended."""
        ...


class Ring:
    """From rank to rank: while a rank works on what came, it passes it on and receives what comes next. Gradients
    follow one step behind: each rank adds its part, and the last one sends the sum home."""

    def __init__(self, plan: Plan, group: Group) -> None:
        self.plan, self.group = plan, group
        self.steps = range(1, max((route.hops for route in plan.routes), default=0) + 1)

    def visits(self, k: Tensor, v: Tensor) -> Iterator[Visit]:
        coming = self._pass_on(1, self._leaving(k, v), k, v)
        yield self.plan.own, k, v
        for step in self.steps:
            here = coming.wait()
            coming = self._pass_on(step + 1, here, k, v)
            for i, kv in here.items():
                yield self.plan.met[i], *_parts(kv, k)

    def returns(self, k: Tensor, v: Tensor, dkv: Tensor) -> Iterator[Return]:
        coming = self._pass_on(1, self._leaving(k, v), k, v)
        back = self._pass_back(0, {}, dkv)
        yield self.plan.own, k, v, dkv
        for step in self.steps:
            here = coming.wait()
            coming = self._pass_on(step + 1, here, k, v)
            sums = {i: kv.new_zeros(kv.shape, dtype=dkv.dtype) for i, kv in here.items()}
            for i, kv in here.items():
                yield self.plan.met[i], *_parts(kv, k), sums[i]
            self._add(back.wait(), sums, dkv)
            back = self._pass_back(step, sums, dkv)
        self._add(back.wait(), {}, dkv)

    def _leaving(self, k: Tensor, v: Tensor) -> dict[int, Tensor]:
        """What this rank gives, by route."""
        own = ((i, r.keys) for i, r in self._at_hop(0))
        return {i: torch.cat([k[:, keys], v[:, keys]], -1) for i, keys in own}

    def _at_hop(self, hop: int) -> Iterator[tuple[int, Route]]:
        """Routes that reach this rank by so many hops."""
        return ((i, r) for i, r in enumerate(self.plan.routes) if self.plan.hop(r) == hop <= r.hops)

    def _pass_on(self, step: int, here: Mapping[int, Tensor], k: Tensor, v: Tensor) -> "_Coming":
        """Start the next hop of what is here, and of what comes by it."""
        routes, n, rank = self.plan.routes, self.plan.n, self.plan.rank
        send = [(kv, (rank + routes[i].step) % n) for i, kv in here.items() if routes[i].hops >= step]
        buffers, sources = {}, []
        for i, r in self._at_hop(step):
            shape = len(k), r.keys.stop - r.keys.start, k.shape[2], k.shape[3] + v.shape[3]
            buffers[i] = k.new_empty(shape)
            sources.append((buffers[i], (rank - r.step) % n))
        return _Coming(buffers, comm.start_exchange(send, sources, self.group, "keys and values"))

    def _pass_back(self, step: int, sums: Mapping[int, Tensor], dkv: Tensor) -> "_Coming":
        """Send sums on to the rank that works on these keys next, or home from the last one."""
        routes, n, rank = self.plan.routes, self.plan.n, self.plan.rank
        send = [(s, (rank + r.step) % n if step < r.hops else r.owner) for i, s in sums.items() for r in [routes[i]]]
        buffers, sources = {}, []
        for i, r in enumerate(routes):
            last = r.owner == rank and r.hops == step
            if step and (last or self.plan.hop(r) == step + 1 <= r.hops):
                buffers[i] = dkv.new_empty(len(dkv), r.keys.stop - r.keys.start, *dkv.shape[2:])
                sources.append((buffers[i], (rank + r.step * r.hops if last else rank - r.step) % n))
        return _Coming(buffers, comm.start_exchange(send, sources, self.group, "gradients of keys and values"))

    def _add(self, sums: Mapping[int, Tensor], to: Mapping[int, Tensor], dkv: Tensor) -> None:
        for i, s in sums.items():
            route = self.plan.routes[i]
            (dkv[:, route.keys] if route.owner == self.plan.rank else to[i]).add_(s)


class _Coming:
    """Tensors under way, by route."""

    def __init__(self, buffers: Mapping[int, Tensor], exchange: comm.Exchange) -> None:
        self._buffers, self._exchange = buffers, exchange

    def wait(self) -> Mapping[int, Tensor]:
        self._exchange.wait()
        return self._buffers


class Gather:
    """All keys and values at once, beside the own block; in backward again, and the sums of gradients come back by a
    reduce-scatter."""

    def __init__(self, plan: Plan, group: Group) -> None:
        self.plan, self.group = plan, group

    def visits(self, k: Tensor, v: Tensor) -> Iterator[Visit]:
        coming = comm.start_all_gather(torch.cat([k, v], -1), self.group, "keys and values")
        yield self.plan.own, k, v
        everyone = coming.wait()
        for route, blocks in zip(self.plan.routes, self.plan.met, strict=True):
            yield blocks, *_parts(everyone[route.owner, :, route.keys], k)

    def returns(self, k: Tensor, v: Tensor, dkv: Tensor) -> Iterator[Return]:
        coming = comm.start_all_gather(torch.cat([k, v], -1), self.group, "keys and values")
        yield self.plan.own, k, v, dkv
        everyone = coming.wait()
        sums = dkv.new_zeros(everyone.shape)
        for route, blocks in zip(self.plan.routes, self.plan.met, strict=True):
            theirs = (slice(None), route.keys)
            yield blocks, *_parts(everyone[route.owner][theirs], k), sums[route.owner][theirs]
        dkv.add_(comm.start_reduce_scatter(sums, self.group, "gradients of keys and values").wait())


def _parts(kv: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """(B, .., G, h+v) -> keys (B, .., G, h), values (B, .., G, v)"""
    return kv[..., : k.shape[-1]], kv[..., k.shape[-1] :]
