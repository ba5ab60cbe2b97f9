"""Checkpoints without ranks: whole tensors out of one of any layout, and weights that come from elsewhere into one."""

import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from research.mesh import Box
from research.train.checkpoint.index import (
    CheckpointError,
    Entry,
    File,
    Index,
    damage,
    damaged,
    find,
    newest,
    open_index,
    write_index,
)
from research.train.checkpoint.pieces import slices
from research.train.checkpoint.storage import WEIGHT, metadata_of, read
from research.train.checkpoint.tensor_file import Pace, write_file

SHARD_BYTES = 2**30


class StoredWeights:
    """The weights of a checkpoint by their full names, whatever layout wrote them.

    `place` is the folder of a checkpoint or of a run, whose newest one is taken. Raises CheckpointError where there is
    none, or where a file is damaged; without `verify`, where its size tells."""

    def __init__(self, place: str | Path, verify: bool = True) -> None:
        self.folder = find(Path(place))
        self._index = open_index(self.folder)
        self.config: Mapping[str, Any] = self._index.state["config"]  # sections of keys, as a row has them
        self.entries: Mapping[str, Entry] = {
            name.removeprefix(WEIGHT): e for name, e in self._index.tensors.items() if name.startswith(WEIGHT)
        }
        self.corpus: str | None = self._index.state.get("corpus")  # digest; None where no run of ours wrote it
        self.verify(contents=verify)

    def verify(self, part: int = 0, parts: int = 1, contents: bool = True) -> None:
        """Hold every file, or this part of them, to its size, and by `contents` to its checksum."""
        used = sorted({file for e in self.entries.values() for file in e.boxes.values()})[part::parts]
        if problems := list(damage(self.folder, used, self._index.files, contents)):
            raise damaged(self.folder, problems)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A weight, or a box of it, on the host and in the dtype that it is stored in; no other bytes are read."""
        return read_tensor(self.folder, self._index, WEIGHT + name, box)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor of each weight, read when it is asked for."""
        return ((name, self.read(name)) for name in self.entries)


def read_tensor(folder: Path, index: Index, name: str, box: Box | None = None) -> Tensor:
    """A stored tensor, or a box of it."""
    entry = index.tensors[name]
    box = whole_box(entry.shape) if box is None else box
    offsets, sizes = torch.Size([o for o, _ in box]), torch.Size([n for _, n in box])
    out = torch.empty(sizes, dtype=entry.dtype)
    wanted = [ChunkStorageMetadata(offsets, sizes)] if out.numel() else []
    items = create_read_items_for_chunk_list(name, metadata_of(entry), wanted)
    read(folder, index, items, lambda item: out[slices(item.dest_offsets, item.lengths)])
    return out


def whole_box(shape: Iterable[int]) -> Box:
    return tuple((0, n) for n in shape)


def write_weights(
    folder: str | Path,
    weights: Iterable[tuple[str, Tensor]],
    config: Mapping[str, Any],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """A checkpoint of weights alone, to start from (`checkpoint.weights`) or to generate with. `weights` are full names
    and whole tensors on the host; no more of them than `shard_bytes`, or one, are kept at a time. `config` is what
    `to_mapping` gives. Nothing is left where the iterable raises, or CheckpointError where writing fails, the folder
    holds a checkpoint already, or a name comes twice."""
    folder, save = Path(folder), uuid.uuid4().hex[:8]
    if newest(folder) is not None:
        raise CheckpointError(f"{folder} holds a checkpoint already")
    files: dict[str, File] = {}
    entries: dict[str, Entry] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be made: {error.strerror}") from error
    try:
        for number, shard in enumerate(_shards(weights, shard_bytes)):
            file = f"{save}-{number:05d}-weights.safetensors"
            if twice := sorted(entries.keys() & shard.keys()):
                raise CheckpointError(f"{twice[0].removeprefix(WEIGHT)} comes twice")
            files[file] = write_file(folder, file, shard, Pace())
            entries |= {n: Entry(t.dtype, tuple(t.shape), {whole_box(t.shape): file}) for n, t in shard.items()}
            shard.clear()  # before the next one is made
        write_index(folder, Index(1, {"config": config}, files, entries))
    except BaseException:
        for path in folder.glob(f"{save}-*"):
            path.unlink()
        raise


def _shards(weights: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, tensor in weights:
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > shard_bytes:
            yield shard
            shard = {}
        if WEIGHT + name in shard:
            raise CheckpointError(f"{name} comes twice")
        shard[WEIGHT + name] = tensor
    if shard:
        yield shard
