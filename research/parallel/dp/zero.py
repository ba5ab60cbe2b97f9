"""ZeRO (Rajbhandari et al. 2020, section 5): what data parallelism repeats on every rank is cut over the ranks.

Three switches, each with those before it:

    optimizer   masters and moments are shards; updated weights are gathered after the step
    gradients   those of each microbatch are reduce-scattered into shards as soon as a bucket is complete
    parameters  between uses they are shards; a unit is gathered before its forward and its backward, then freed

n ranks that share one box, s elements of the shards of a bucket
"""

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from research.built import Built, hollow
from research.config import DpConfig, TrainConfig
from research.mesh import Box, Group
from research.parallel.dp.gather import Gathering, units_of
from research.parallel.dp.shards import Place, Ranks, Shard, Sharded, placed
from research.train.storage import Bucket, Storage

T = TypeVar("T")


class Zero(Storage):
    """Training state cut over the ranks that hold the same box, or over those of each of `dp.replicas`."""

    buckets: Sequence[Sharded]
    held: Mapping[str, Shard]

    def __init__(
        self, built: Built, config: TrainConfig, device: torch.device, grad_dtype: torch.dtype | None, dp: DpConfig
    ) -> None:
        self.cuts_gradients, self.cuts_parameters = dp.zero >= 2, dp.zero >= 3
        mesh, parts = built.mesh, dp.replicas
        self._ranks = {
            name: Ranks(mesh.shards(at, parts), mesh.shards(at, parts, "parameters"), mesh.shard_copies(at, parts))
            for name, at in built.layouts.items()
        }
        units = units_of(built.model)
        self._unit = {f"{unit}.{name}": unit for unit, m in units.items() for name, _ in m.named_parameters()}
        super().__init__(built, config, device, grad_dtype, reduce_each_microbatch=self.cuts_gradients)
        self._gathering = Gathering(self._to_gather(units), mesh.ledger, dp.keep_gathered)

    def _to_gather(self, units: Mapping[str, nn.Module]) -> Iterator[tuple[nn.Module, list[Sharded]]]:
        """Units, with their buckets, that exist only while they are used."""
        if self.cuts_parameters:
            for unit, module in units.items():
                yield module, [b for b in self.buckets if self._unit[next(iter(b.held))] == unit]

    def _bucket_limit_bytes(self) -> float:
        return math.inf if self.cuts_parameters else super()._bucket_limit_bytes()

    def _bucket_key(self, name: str) -> Hashable:
        return super()._bucket_key(name), self._unit[name] if self.cuts_parameters else None

    def _bucket(self, names: Sequence[str]) -> Sharded:
        ranks = self._ranks[names[0]]
        n, rank = ranks.shards.size, ranks.shards.rank
        tensors = {name: (tuple(self._parameters[name].shape), self._used_dtype(name)) for name in names}
        places, size, row_bytes = placed(tensors, n)
        shape = (size,) if self.cuts_gradients else (n, size)
        gradients = torch.zeros(shape, dtype=self.grad_dtype, device=self.device)
        rows, flat = (None, gradients) if self.cuts_gradients else (gradients, gradients[rank])
        kept = torch.zeros(row_bytes, dtype=torch.uint8, device=self.device) if self.cuts_parameters else None
        held = {name: self._shard(name, place, rank, flat, kept) for name, place in places.items()}
        stage, ledger = self._stage(names[0]), self.built.mesh.ledger
        return Sharded(ranks.copies, stage, held, flat, ranks, ledger, row_bytes, rows, kept)

    def _shard(self, name: str, place: Place, rank: int, flat: Tensor, kept: Tensor | None) -> Shard:
        parameter, cut = self._parameters[name], place.cut
        whole = self.built.initial(name) if self.cuts_parameters else parameter.detach()
        part = cut.split(whole).select(cut.dim, rank)
        weight = part.contiguous() if kept is None else place.weight(kept).view(cut.shard_shape).copy_(part)
        # The optimizer steps what forward uses where that has the master's dtype and lies in one piece.
        own = place.dtype == self.dtype
        master = weight if own else part.clone(memory_format=torch.contiguous_format)
        self._cast(name)
        return Shard(name, parameter, master, place.gradient(flat).view(cut.shard_shape), place)

    def _cast(self, name: str) -> None:
        if self.cuts_parameters:
            parameter = self._parameters[name]
            parameter.data = hollow(tuple(parameter.shape), self._used_dtype(name), self.device)
        else:
            super()._cast(name)

    def begin_forward(self, stage: int) -> None:
        self._gathering.begin(stage)

    def begin_backward(self, stage: int, last: bool) -> None:
        super().begin_backward(stage, last)
        self._gathering.begin(stage)

    def finish_backward(self) -> None:
        super().finish_backward()
        self._gathering.drop()

    def _on_gradient(self, parameter: Tensor) -> None:
        super()._on_gradient(parameter)
        self._gathering.reached(parameter)

    def _reduce(self, bucket: Bucket) -> None:
        """One reduction is under way at a time: the one before has had the time of a bucket's backward."""
        for earlier in self.buckets:
            earlier.arrive()
        super()._reduce(bucket)

    def _box(self, name: str) -> Box:
        box = super()._box(name)
        if name not in self.held:
            return box
        return self.held[name].place.cut.box(box, self._ranks[name].shards.rank)

    def publish(self) -> None:
        if self.cuts_parameters:
            for bucket in self.buckets:
                bucket.publish()
            return
        for bucket, coming in _ahead((bucket, bucket.start_gather()) for bucket in self.buckets):
            bucket.fill(coming)

    def copies(self, name: str) -> Group:
        return self._ranks[name].copies if name in self.held else super().copies(name)

    def tensors(self) -> dict[str, list[Tensor]]:
        known = super().tensors()
        if self.cuts_parameters:
            known["parameters"] = [*(b.kept for b in self.buckets if b.kept is not None), *self._untrained().values()]
        return known


def _ahead(items: Iterable[T]) -> Iterator[T]:
    """Each item, once the one after it has been made."""
    before: list[T] = []
    for item in items:
        yield from before
        before = [item]
    yield from before
