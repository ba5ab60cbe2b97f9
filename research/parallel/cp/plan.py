"""Who holds which tokens, which of a rank's queries meet which keys, and what travels for it: plain data, no tensors.

Each mask (causal, of a window, of documents) lets a query see an interval of keys, and neither end of it moves back
from one query to the next. So every part of the square is a full block or a triangle: no mask is ever made.

S tokens of a sample, n ranks, L = S/n tokens of one rank
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

Balance = Literal["none", "zigzag", "striped"]
Kind = Literal["full", "causal", "reversed"]
EVERY = slice(None)


class Run(NamedTuple):
    """Tokens at positions start, start + step, .."""

    start: int
    step: int
    length: int

    def before(self, places: np.ndarray) -> np.ndarray:
        """How many of these tokens stand before each of the places."""
        return np.clip(-((self.start - places) // self.step), 0, self.length)


class Block(NamedTuple):
    """Queries and keys that meet, by their places in what a rank holds.

    full: all see all. causal: there are as many of both, and query i sees the keys up to i. reversed: it sees those
    from i on, which is causal again when both are turned round. `tiles`: equal triangles that follow each other.
    """

    samples: slice
    queries: slice
    keys: slice
    kind: Kind = "full"
    tiles: int = 1

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, in one sample."""
        queries, keys = (s.stop - s.start for s in (self.queries, self.keys))
        return queries * keys if self.kind == "full" else queries * (queries // self.tiles + 1) // 2


class Route(NamedTuple):
    """Keys of `owner`, by their places, that travel from rank to rank: `hops` times, up (step 1) or down (-1)."""

    owner: int
    keys: slice
    step: int
    hops: int


class Visible(NamedTuple):
    """What queries see in some samples: the places of the first key, and of the one after the last."""

    samples: slice
    low: np.ndarray
    high: np.ndarray

    def among(self, keys: slice) -> "Visible":
        """The same, of some keys only, counted from the first of these."""
        low, high = (np.clip(end, keys.start, keys.stop) - keys.start for end in (self.low, self.high))
        return Visible(self.samples, low, high)


@dataclass(frozen=True)
class Plan:
    """One rank's part of an attention: blocks with its own keys, and those with what comes by each route, by the places
    there. Routes are the same on all ranks, in the same order."""

    n: int
    rank: int
    own: tuple[Block, ...]
    routes: tuple[Route, ...]
    met: tuple[tuple[Block, ...], ...]  # by route

    def hop(self, route: Route, rank: int | None = None) -> int:
        """After how many hops a route reaches a rank, this one by default."""
        return ((self.rank if rank is None else rank) - route.owner) * route.step % self.n

    @property
    def pairs(self) -> int:
        """The work of this rank: pairs of a query and a key that it sees, in each kind of sample."""
        return sum(block.pairs for blocks in (self.own, *self.met) for block in blocks)

    def received(self, rank: int | None = None) -> int:
        """Tokens of a sample whose keys and values come to a rank."""
        return sum(r.keys.stop - r.keys.start for r in self.routes if 0 < self.hop(r, rank) <= r.hops)

    def returned(self, rank: int | None = None) -> int:
        """Tokens of a sample for which gradients come to a rank: sums of others to add to, and its own, come home."""
        own = self.rank if rank is None else rank
        mine = (r for r in self.routes if r.owner == own or 1 < self.hop(r, own) <= r.hops)
        return sum(r.keys.stop - r.keys.start for r in mine)


def held(balance: Balance, sequence: int, n: int, rank: int) -> list[Run]:
    """The tokens of one rank, in order of position.

    none: a part of the sample. zigzag: of 2n parts the one of this number from the start and the one from the end
    (Llama 3, section 3.3.2). striped: every n-th token (Brandon et al. 2023, section 3).
    """
    if balance == "striped":
        return [Run(rank, n, sequence // n)]
    parts = [rank, 2 * n - 1 - rank] if balance == "zigzag" and n > 1 else [rank]
    length = sequence // n // len(parts)
    return [Run(part * length, 1, length) for part in parts]


def positions(runs: list[Run]) -> np.ndarray:
    return np.concatenate([run.start + run.step * np.arange(run.length) for run in runs])


def make_plan(
    n: int, rank: int, balance: Balance, sequence: int, window: int = 0, starts: np.ndarray | None = None
) -> Plan:
    """`window`: tokens that a token sees, itself included; 0: all before it. `starts` (B, S): where the document of
    each token begins; None: the samples are whole."""
    if starts is None:
        return _plan_of_whole_samples(n, rank, balance, sequence, window)
    return _plan(n, rank, balance, sequence, window, starts)


def _plan(n: int, rank: int, balance: Balance, sequence: int, window: int, starts: np.ndarray | None) -> Plan:
    holders = [held(balance, sequence, n, r) for r in range(n)]
    wishes = [list(_wishes(positions(runs), window, starts)) for runs in holders]

    def seen(asker: int, owner: int) -> list[Visible]:
        return [Visible(s, *(_before(holders[owner], end) for end in ends)) for s, *ends in wishes[asker]]

    routes, met = [], []
    for owner in range(n):
        views = {r: seen(r, owner) for r in range(n) if r != owner}
        for keys in _pieces(holders[owner]):
            if route := _route(owner, keys, views, n):
                routes.append(route)
                met.append(tuple(b for v in views.get(rank, ()) for b in blocks(v.among(route.keys))))
    own = tuple(b for v in seen(rank, rank) for b in blocks(v))
    return Plan(n, rank, own, tuple(routes), tuple(met))


@lru_cache(maxsize=64)
def _plan_of_whole_samples(n: int, rank: int, balance: Balance, sequence: int, window: int) -> Plan:
    return _plan(n, rank, balance, sequence, window, None)


def _wishes(
    queries: np.ndarray, window: int, starts: np.ndarray | None
) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """The first position that each query sees, and the one after the last; for all samples together where they are
    alike."""
    first = queries - window + 1 if window else np.zeros_like(queries)
    if starts is None:
        yield EVERY, first, queries + 1
        return
    begins = np.maximum(starts[:, queries], first)
    alike = bool((begins == begins[:1]).all())
    for b, row in enumerate(begins[:1] if alike else begins):
        yield EVERY if alike else slice(b, b + 1), row, queries + 1


def _before(runs: list[Run], places: np.ndarray) -> np.ndarray:
    return np.stack([run.before(places) for run in runs]).sum(0)


def _pieces(runs: list[Run]) -> Iterator[slice]:
    """The places of each run: what travels on its own."""
    low = 0
    for run in runs:
        yield slice(low, low + run.length)
        low += run.length


def _route(owner: int, keys: slice, views: dict[int, list[Visible]], n: int) -> Route | None:
    """The shorter way round that reaches all ranks which see some of these keys, for those that any of them sees."""
    wanted: dict[int, tuple[int, int]] = {}
    for asker, seen in views.items():
        for v in (v.among(keys) for v in seen):
            if (sees := v.low < v.high).any():
                low, high = wanted.get(asker, (len(v.low) * n, 0))
                wanted[asker] = min(low, int(v.low[sees].min())), max(high, int(v.high[sees].max()))
    if not wanted:
        return None
    hops, step = min((max((asker - owner) * step % n for asker in wanted), -step) for step in (1, -1))
    low, high = min(low for low, _ in wanted.values()), max(high for _, high in wanted.values())
    return Route(owner, slice(keys.start + low, keys.start + high), -step, hops)


def blocks(seen: Visible) -> Iterator[Block]:
    """The parts of what queries see, each pair of a query and a key once."""
    for low, high, ends in _stretches(seen.low, seen.high):
        yield from _stretch(seen.samples, low, high, int(seen.low[low]), int(seen.high[low]), *ends)


def _stretches(low: np.ndarray, high: np.ndarray) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """Runs of queries from one to the next of which each end stays (0) or moves on by one key (1)."""
    moves = np.stack([np.diff(low), np.diff(high)], 1)
    code = np.where((moves > 1).any(1), -1, moves @ np.array([2, 1]))
    borders = [0, *(np.flatnonzero(np.diff(code)) + 1).tolist(), len(code)]
    done = 0
    for begin, end in itertools.pairwise(borders):
        if begin < end and code[begin] < 0:  # an end leaps: queries for themselves
            yield from ((i, i + 1, (0, 0)) for i in range(done, end))
            done = max(done, end)
        elif done <= end and begin < end:
            yield done, end + 1, divmod(int(code[begin]), 2)
            done = end + 1
    yield from ((i, i + 1, (0, 0)) for i in range(done, len(low)))


def _stretch(samples: slice, i: int, j: int, low: int, high: int, from_: int, to: int) -> Iterator[Block]:
    """Queries i to j, of which the first sees the keys from `low` to `high`; `from_` and `to` say which end moves."""
    if to and not from_ and low == high:  # the first one sees nothing yet
        i, high = i + 1, high + 1
    if from_ and not to:  # the last ones see nothing any more
        j = min(j, i + high - low)
    if i >= j or low == high:
        return
    if from_ and to:
        # A band is two triangles for as many queries as it is wide, less one; the rest is shorter.
        tile = max(high - low - 1, 1)
        if tiles := (j - i) // tile:
            size = tiles * tile
            yield Block(samples, slice(i, i + size), slice(high - 1, high - 1 + size), "causal", tiles)
            if high - low > 1:
                yield Block(samples, slice(i, i + size), slice(low, low + size), "reversed", tiles)
            i, low, high = i + size, low + size, high + size
    rows = j - i
    if rows == 1:
        from_ = to = 0
    if rows and to:
        yield Block(samples, slice(i, j), slice(high - 1, high - 1 + rows), "causal")
    if rows and from_:
        yield Block(samples, slice(i, j), slice(low, low + rows), "reversed")
    if rows and low + from_ * rows < high - to:
        yield Block(samples, slice(i, j), slice(low + from_ * rows, high - to))
