"""Where torch's DCP puts boxes and takes them from: safetensors files under a JSON index.

DCP's own layers do not do: `FileSystemReader` unpickles `.metadata`, and `HuggingFaceStorageWriter` (torch 2.13) keeps
one box a name and file, infers shapes from the boxes, has no checksums and nothing that tells a complete checkpoint.
"""

import dataclasses
import os
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from research.mesh import Box
from research.train.checkpoint.index import (
    CheckpointError,
    DamagedError,
    Entry,
    File,
    Index,
    damage,
    stored_name,
    write_index,
)
from research.train.checkpoint.pieces import slices
from research.train.checkpoint.tensor_file import Pace, write_file

WEIGHT = "weight/"  # of names of weights; their files hold nothing else, so that they can be read without the rest


def new_number(checkpoints: Iterable[float]) -> int:
    """One more than the sound ones have."""
    return max([int(n) for n in checkpoints if n < float("inf")], default=0) + 1


class Stored(NamedTuple):
    """What has become of a box: the file that it is in."""

    name: str
    file: File
    data: TensorWriteData


class Writer(StorageWriter):
    """Writes the boxes of a rank into files of that rank; the coordinator completes the checkpoint by its index.

    Names of files are new in every save, so that one that replaces an older checkpoint of its step leaves that alone
    until its own index stands.
    """

    def __init__(self, folder: Path, number: Callable[[], int], state: Mapping[str, Any], pace: Pace) -> None:
        self._folder, self._number, self._state, self._pace = folder, number, state, pace

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from save to save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self._folder} cannot be made: {error.strerror}") from error
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        save = uuid.uuid4().hex[:8]
        return [dataclasses.replace(plan, storage_data=f"{save}-{rank:05d}") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        for kind in ("weights", "rest"):
            items = [i for i in plan.items if i.index.fqn.startswith(WEIGHT) == (kind == "weights")]
            if items:
                name = f"{plan.storage_data}-{kind}.safetensors"
                tensors: dict[str, Tensor] = {}
                for i in items:
                    value = planner.resolve_data(i)
                    assert isinstance(value, Tensor)
                    tensors[stored_name(i.index.fqn, box_of(data_of(i).chunk))] = value
                file = write_file(self._folder, name, tensors, self._pace)
                results += [WriteResult(i.index, 0, Stored(name, file, data_of(i))) for i in items]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files: dict[str, File] = {}
        tensors: dict[str, Entry] = {}
        for name, stored in ((r.index.fqn, r.storage_data) for of_rank in results for r in of_rank):
            files[stored.name] = stored.file
            new = Entry(stored.data.properties.dtype, tuple(stored.data.size), {})
            tensors.setdefault(name, new).boxes[box_of(stored.data.chunk)] = stored.name
        try:
            write_index(self._folder, Index(self._number(), self._state, files, tensors))
        except OSError as error:
            raise CheckpointError(f"the index of {self._folder} cannot be written: {error}") from error

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def box_of(chunk: ChunkStorageMetadata) -> Box:
    return tuple(zip(chunk.offsets, chunk.sizes, strict=True))


def data_of(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None
    return item.tensor_data


class Reader(StorageReader):
    """Reads parts of boxes. Before anything is read, each rank verifies its share of the files that hold `names`."""

    def __init__(self, folder: Path, index: Index, names: Collection[str], rank: int, world: int) -> None:
        self._folder, self._index = folder, index
        used = {file for name in names if name in index.tensors for file in index.tensors[name].boxes.values()}
        self._mine = sorted(used)[rank::world]

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from load to load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({name: metadata_of(entry) for name, entry in self._index.tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the index was given."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        if problems := list(damage(self._folder, self._mine, self._index.files)):
            raise DamagedError("\n".join(problems))
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        read(self._folder, self._index, plan.items, planner.resolve_tensor)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def read(folder: Path, index: Index, items: Sequence[ReadItem], target: Callable[[ReadItem], Tensor]) -> None:
    """Copy what each item names into its target, file by file; no other bytes are read."""
    by_file: dict[str, list[tuple[str, ReadItem]]] = {}
    places = {n: places_of(n, index.tensors[n]) for n in {item.storage_index.fqn for item in items}}
    for item in items:
        assert item.storage_index.offset is not None
        stored, file = places[item.storage_index.fqn][tuple(item.storage_index.offset)]
        by_file.setdefault(file, []).append((stored, item))
    for file, wanted in by_file.items():
        with safe_open(folder / file, framework="pt") as opened:
            for stored, item in wanted:
                part = opened.get_slice(stored)[slices(item.storage_offsets, item.lengths)]
                target(item).copy_(part)


def places_of(name: str, entry: Entry) -> dict[tuple[int, ...], tuple[str, str]]:
    """By offsets: the name under which a box stands in its file, and the file."""
    return {tuple(o for o, _ in box): (stored_name(name, box), file) for box, file in entry.boxes.items()}


def metadata_of(entry: Entry) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size([o for o, _ in box]), torch.Size([n for _, n in box])) for box in entry.boxes
    ]
    return TensorStorageMetadata(TensorProperties(entry.dtype), torch.Size(entry.shape), chunks)
