"""Shards: how a tensor is cut over the ranks that hold copies of it, and how a bucket of shards travels.

A shard is a box again. n ranks; c = ceil(d / n) of the d elements along the cut dim, the last shards end with padding
where n does not divide d; s elements of the shards of a bucket, one row of its gradient for each rank.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from research import comm
from research.ledger import Ledger
from research.mesh import Box, Group
from research.train.storage import Bucket, Held


@dataclass(frozen=True)
class Cut:
    """A tensor of `shape` in n parts along the first dim that n divides; where there is none, along the longest."""

    shape: tuple[int, ...]
    n: int

    @cached_property
    def dim(self) -> int:
        even = [i for i, d in enumerate(self.shape) if d % self.n == 0]
        return even[0] if even else max(range(len(self.shape)), key=self.shape.__getitem__)

    @cached_property
    def shard_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], -(-self.shape[self.dim] // self.n), *self.shape[self.dim + 1 :])

    @property
    def numel(self) -> int:
        """Elements of a shard."""
        return math.prod(self.shard_shape)

    @property
    def padding(self) -> int:
        """Elements along the cut dim."""
        return self.n * self.shard_shape[self.dim] - self.shape[self.dim]

    def box(self, whole: Box, rank: int) -> Box:
        """A rank's part of a box. The local tensor may be larger than its box: the rest is padding as well."""
        offset, size = whole[self.dim]
        each = self.shard_shape[self.dim]
        low, high = (min(r * each, size) for r in (rank, rank + 1))
        return (*whole[: self.dim], (offset + low, high - low), *whole[self.dim + 1 :])

    def split(self, local: Tensor) -> Tensor:
        """(.., d, ..) -> (.., n, c, ..), a view where n divides d."""
        if self.padding:
            local = F.pad(local, (*[0, 0] * (len(self.shape) - 1 - self.dim), 0, self.padding))
        return local.unflatten(self.dim, (self.n, -1))

    def rows(self, flat: Tensor) -> Tensor:
        """(n, numel of a shard) -> (.., n, c, ..), a view."""
        return flat.view(self.n, *self.shard_shape).movedim(0, self.dim)

    def write(self, flat: Tensor, out: Tensor) -> None:
        """(n, numel of a shard) into (.., d, ..), without the padding."""
        if self.padding:
            out.copy_(self.rows(flat).flatten(self.dim, self.dim + 1).narrow(self.dim, 0, self.shape[self.dim]))
        else:
            out.unflatten(self.dim, (self.n, -1)).copy_(self.rows(flat))


@dataclass(frozen=True)
class Ranks:
    """Who shares one parameter."""

    shards: Group  # its box is cut over these, and gradients are reduced among them
    gather: Group  # the same ranks, for weights
    copies: Group  # those that hold the same shard


@dataclass(frozen=True)
class Place:
    """Where a parameter's shard stands in a row of its bucket, and the dtype of its weight there."""

    cut: Cut
    dtype: torch.dtype
    at: int  # elements before its gradient
    at_byte: int  # before its weight

    def gradient(self, rows: Tensor) -> Tensor:
        """(.., s) -> (.., numel of the shard), a view."""
        return rows.narrow(-1, self.at, self.cut.numel)

    def weight(self, rows: Tensor) -> Tensor:
        """(.., bytes of a row) -> (.., numel of the shard), a view."""
        return rows.narrow(-1, self.at_byte, self.cut.numel * self.dtype.itemsize).view(self.dtype)


def placed(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], n: int) -> tuple[dict[str, Place], int, int]:
    """Places of tensors with these shapes and dtypes, s, and the bytes of a row of weights: wide ones stand first, so
    that each starts at a multiple of its size."""
    places, at, at_byte = {}, 0, 0
    for name, (shape, dtype) in sorted(tensors.items(), key=lambda item: -item[1][1].itemsize):
        places[name] = place = Place(Cut(shape, n), dtype, at, at_byte)
        at, at_byte = at + place.cut.numel, at_byte + place.cut.numel * dtype.itemsize
    widest = max(dtype.itemsize for _, dtype in tensors.values())
    return places, at, -(-at_byte // widest) * widest


@dataclass
class Shard(Held):
    """One parameter's part on this rank."""

    place: Place


@dataclass
class Sharded(Bucket):
    """`group` are the copies of the shards, `flat` (s,) is their gradient."""

    held: Mapping[str, Shard]
    ranks: Ranks
    ledger: Ledger
    row_bytes: int
    rows: Tensor | None  # (n, s) gradients before their reduction; None: they come and go with each microbatch
    kept: Tensor | None  # (row_bytes,) weights as forward uses them; None: every rank has them whole
    last: bool = field(default=False, init=False)
    summing: comm.Pending | None = field(default=None, init=False, repr=False)  # over the copies

    def __post_init__(self) -> None:
        self.passing = self.rows is None

    def add(self, name: str, grad: Tensor) -> None:
        with self.ledger.buffers():
            super().add(name, self.held[name].place.cut.split(grad))

    def _place(self, name: str) -> Tensor:
        place = self.held[name].place
        return place.cut.rows(place.gradient(self._rows()))

    def _rows(self) -> Tensor:
        if self.rows is None:
            self.rows, self.stale = self.flat.new_empty(self.ranks.shards.size, len(self.flat)), set(self.held)
        return self.rows

    def reduce(self, last: bool) -> None:
        with self.ledger.buffers():
            rows = self._rows()
            self._complete()
            self.pending = comm.start_reduce_scatter(rows, self.ranks.shards, "gradients")
        self.last = last
        if self.passing:
            self.rows = None

    def arrive(self) -> None:
        """The reduction over the ranks of the shards is done; after the last one the copies are summed."""
        if self.pending is None:
            return
        with self.ledger.buffers():
            part, self.pending = self.pending.wait(), None
        if self.passing:
            self.flat.add_(part)
        else:
            self.flat.copy_(part)
        if self.last:
            self.summing = comm.start_all_reduce(self.flat, self.group, "gradients")

    def finish(self) -> None:
        self.arrive()
        if self.summing is not None:
            self.summing.wait()
            self.summing = None

    def clear(self) -> None:
        if self.passing:
            self.flat.zero_()
        else:
            super().clear()

    def start_gather(self) -> comm.Pending:
        """All ranks' weights, as forward uses them."""
        with self.ledger.buffers():
            return comm.start_all_gather(self._row(), self.ranks.gather, "parameters")

    def _row(self) -> Tensor:
        if self.kept is not None:
            return self.kept
        row = self.flat.new_empty(self.row_bytes, dtype=torch.uint8)
        for shard in self.held.values():
            shard.place.weight(row).copy_(shard.master.flatten())
        return row

    def publish(self) -> None:
        """Masters have changed: kept weights follow."""
        if self.kept is not None:
            for shard in self.held.values():
                weight = shard.place.weight(self.kept)
                if weight.dtype != shard.master.dtype:
                    weight.copy_(shard.master.flatten())

    def fill(self, coming: comm.Pending) -> None:
        """Write gathered weights where forward finds them. `data`, as autograd must not see it."""
        with self.ledger.buffers():
            rows = coming.wait()
            for shard in self.held.values():
                shard.place.cut.write(shard.place.weight(rows), shard.parameter.data)
