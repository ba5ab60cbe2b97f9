"""What goes into a checkpoint and comes out of it: boxes of named global tensors, planned for torch's DCP.

Each rank tells which boxes it has; the coordinator sees those of all ranks, refuses what does not fit, and only then
is anything written or read. Which axes made the boxes plays no role.
"""

import dataclasses
import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from research.mesh import Box
from research.train.checkpoint.index import CheckpointError, told


@dataclasses.dataclass(frozen=True)
class Piece:
    """A box of the global tensor `name` of this `shape`, as one rank holds it. `tensor` has the sizes of the box:
    padding is left out. Of the ranks that hold copies of a box, exactly one `writes` it; all of them read it."""

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor
    writes: bool = True

    def __post_init__(self) -> None:
        sizes = tuple(size for _, size in self.box)
        if tuple(self.tensor.shape) != sizes:
            rule = f"its box {boxed(self.box)} has sizes {sizes}: padding is no part of a checkpoint"
            raise ValueError(f"{self.name}: a local tensor of shape {tuple(self.tensor.shape)}, while {rule}")

    @property
    def empty(self) -> bool:
        return self.tensor.numel() == 0

    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(
            torch.Size([offset for offset, _ in self.box]), torch.Size([size for _, size in self.box])
        )


def boxed(box: Box) -> str:
    """A box as slices are written."""
    return f"[{', '.join(f'{offset}:{offset + size}' for offset, size in box)}]"


class Planned(NamedTuple):
    """A box that a rank is about to write."""

    rank: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box


class Saves(SavePlanner):
    """Plans to write the pieces of this rank; the coordinator sees to it that the pieces of all ranks make each tensor
    exactly once."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """DCP hands over a state dict, which is empty here: pieces say more."""

    def create_local_plan(self) -> SavePlan:
        self._plan = SavePlan([self._item(i, p) for i, p in enumerate(self._pieces)])
        return self._plan

    def _item(self, i: int, piece: Piece) -> WriteItem:
        chunk = piece.chunk()
        data = TensorWriteData(chunk, TensorProperties(piece.tensor.dtype), torch.Size(piece.shape))
        return WriteItem(MetadataIndex(piece.name, chunk.offsets, i), WriteItemType.SHARD, tensor_data=data)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        planned: dict[str, list[Planned]] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                data = item.tensor_data
                assert data is not None
                box = tuple(zip(data.chunk.offsets, data.chunk.sizes, strict=True))
                one = Planned(rank, tuple(data.size), data.properties.dtype, box)
                planned.setdefault(item.index.fqn, []).append(one)
        if problems := [p for name, boxes in planned.items() for p in cover_problems(name, boxes)]:
            raise CheckpointError(f"the boxes of the ranks make no checkpoint:{told(problems)}")
        return [SavePlan([]) for _ in all_plans], Metadata({})  # ranks know their own, and nobody needs all of them

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return dataclasses.replace(new_plan, items=self._plan.items)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        assert write_item.index.index is not None
        return self._pieces[write_item.index.index].tensor


def cover_problems(name: str, boxes: Sequence[Planned]) -> Iterator[str]:
    """Why the boxes do not make the tensor exactly once; copies may not be written twice, as they might differ."""
    first = boxes[0]
    for b in boxes:
        if (b.shape, b.dtype) != (first.shape, first.dtype):
            of_first = f"{first.dtype} {first.shape} of rank {first.rank}"
            yield f"{name}: {b.dtype} {b.shape} of rank {b.rank} is not the {of_first}"
            return
        if any(low < 0 or low + size > whole for (low, size), whole in zip(b.box, b.shape, strict=True)):
            yield f"{name}: box {boxed(b.box)} of rank {b.rank} leaves the shape {b.shape}"
            return
    for a, b in _overlaps(boxes):
        what = f"{boxed(a.box)} of rank {a.rank} and {boxed(b.box)} of rank {b.rank}"
        yield f"{name}: boxes {what} are both written, and overlap"
        return
    held = sum(math.prod(size for _, size in b.box) for b in boxes)
    if held != math.prod(first.shape):
        yield f"{name}: the boxes hold {held} of {math.prod(first.shape)} elements"


def _overlaps(boxes: Sequence[Planned]) -> Iterator[tuple[Planned, Planned]]:
    """Pairs that share an element: a sweep along the dim that is cut most often."""
    rank = len(boxes[0].shape)
    dim = max(range(rank), key=lambda d: len({b.box[d] for b in boxes}), default=0)
    if not rank and len(boxes) > 1:
        yield boxes[0], boxes[1]
    active: list[Planned] = []
    for b in sorted(boxes, key=lambda b: b.box[dim]) if rank else ():
        active = [a for a in active if sum(a.box[dim]) > b.box[dim][0]]
        for a in active:
            if all(x < y + n and y < x + m for (x, m), (y, n) in zip(a.box, b.box, strict=True)):
                yield a, b
        active.append(b)


class Loads(LoadPlanner):
    """Plans to fill the pieces of this rank; the coordinator compares what all ranks want with what is stored.

    `expected(name)`: whether a stored tensor that nobody wants is one too many. `widen`: a stored dtype that the wanted
    one holds exactly will do.
    """

    def __init__(self, pieces: Sequence[Piece], expected: Callable[[str], bool], widen: bool) -> None:
        self._pieces, self._expected, self._widen = pieces, expected, widen

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self._stored: dict[str, Any] = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        items, problems = [], []
        for i, piece in enumerate(self._pieces):
            if found := self._problem(piece):
                problems.append(found)
            elif not piece.empty:
                for item in create_read_items_for_chunk_list(piece.name, self._stored[piece.name], [piece.chunk()]):
                    items.append(dataclasses.replace(item, dest_index=MetadataIndex(piece.name, None, i)))
        return LoadPlan(items, planner_data=({p.name for p in self._pieces}, problems))

    def _problem(self, piece: Piece) -> str | None:
        if piece.name not in self._stored:
            return f"{piece.name} is missing"
        stored, wanted = self._stored[piece.name], piece.tensor.dtype
        if tuple(stored.size) != piece.shape:
            return f"{piece.name} has shape {tuple(stored.size)} instead of {piece.shape}"
        if (dtype := stored.properties.dtype) != wanted:
            if not self._widen:
                return f"{piece.name} is {dtype} instead of {wanted}"
            if torch.promote_types(dtype, wanted) != wanted:
                return f"{piece.name} is {dtype}, which {wanted} does not hold exactly"
        return None

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        wanted = set().union(*(names for names, _ in (plan.planner_data for plan in global_plan)))
        problems = [p for plan in global_plan for p in plan.planner_data[1]]
        problems += [f"{n} is one too many" for n in self._stored if n not in wanted and self._expected(n)]
        if problems:
            raise CheckpointError(f"it does not fit, and nothing was loaded:{told(problems)}")
        return [dataclasses.replace(plan, planner_data=None) for plan in global_plan]

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("all entries are tensors")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        assert read_item.dest_index.index is not None
        tensor = self._pieces[read_item.dest_index.index].tensor
        return tensor[slices(read_item.dest_offsets, read_item.lengths)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: `resolve_tensor` gives views."""


def slices(offsets: Iterable[int], sizes: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
