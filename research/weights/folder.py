"""A Hugging Face folder as parameters of ours, and parameters of ours as a Hugging Face folder."""

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from research.config import ModelConfig
from research.models.params import Spec
from research.problems import Problem, WeightsError
from research.weights.configs import family_of, misfits, read_config, write_config
from research.weights.families import FAMILIES, WHOLE
from research.weights.files import (
    CONFIG,
    DTYPES,
    Entry,
    Shard,
    Tensors,
    new_folder,
    read_json,
    shards,
    write_file,
    write_index,
    write_json,
    write_shard,
)
from research.weights.tensors import Plan, Theirs, parted, plan, sources, to_theirs

BUFFERS = ("*.rotary_emb.inv_freq",)  # old folders hold what is computed
SHARD_BYTES = 5 * 10**9
DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES.values()}


class Weights(Protocol):
    """Whole parameters, by name, wherever they are."""

    model: ModelConfig

    @property
    def meta(self) -> Mapping[str, Tensor]:
        """Shape and dtype of each, as tensors without values."""

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """All of a parameter, or one expert of a stack."""


class HuggingFaceFolder:
    """Weights of a folder by our names. Opening it holds every tensor to the config, by headers: raises WeightsError
    with all that are missing, too many, or of another shape or type.

    `mtp`: with the layers of multi-token prediction; without, they may be there or not.
    """

    def __init__(self, path: Path, mtp: bool = True) -> None:
        if not path.is_dir():
            rule = "is no folder" if path.exists() else "does not exist"
            raise WeightsError(str(path), [Problem(str(path), None, rule, "a Hugging Face folder")])
        config = read_json(path / CONFIG)
        self.family, self.model = read_config(config, str(path / CONFIG))
        self.positions = config.get("max_position_embeddings")  # tokens that it was made for, where it says so
        depth, self.model = self.model.mtp_depth, dataclasses.replace(self.model, mtp_depth=0)
        left_out = tuple(f"model.layers.{self.model.layers + k}." for k in range(depth)) if not mtp else ()
        if mtp:
            self.model = dataclasses.replace(self.model, mtp_depth=depth)
        self.plan, declared = plan(self.model, self.family)
        self._tensors, self._sources = Tensors(path), sources(self.plan)
        self._entries = {n: e for n, e in self._tensors.entries.items() if not n.startswith(left_out or ("\0",))}
        if problems := _differences(self.plan, self._entries) or self._unequal_copies():
            raise WeightsError(str(path), problems)
        self.meta = {n: torch.empty(s.shape, dtype=self._dtype(n), device="meta") for n, s in declared.items()}

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """In the dtype of the folder, a stack of several in one that holds them all exactly. Only what is asked for is
        read."""
        if expert is not None:
            return self._box(name, expert).clone()  # what is kept of a file would keep all of it
        return self.read_box(name, [(0, n) for n in self.meta[name].shape])

    def read_box(self, name: str, box: Sequence[tuple[int, int]]) -> Tensor:
        """(offset, size) of each dim -> that part. Of a file only the pages that hold it are read, where rows stand in
        the same order as ours."""
        inside = tuple(slice(low, low + size) for low, size in box)
        if None in self._sources[name]:
            return self._box(name, None)[inside].clone()
        part = torch.empty([size for _, size in box], dtype=self.meta[name].dtype)
        for expert, held in enumerate(part, box[0][0]):
            held.copy_(self._box(name, expert)[inside[1:]])
        return part

    def _box(self, name: str, expert: int | None) -> Tensor:
        theirs = self._sources[name][expert]
        boxes = parted(theirs, self._tensors.read(theirs.name), self.model)
        return next(box for part, box in boxes.items() if (part.name, part.expert) == (name, expert))

    def _dtype(self, name: str) -> torch.dtype:
        stored = [DTYPES[self._entries[t.name].dtype] for t in self._sources[name].values()]
        return functools.reduce(torch.promote_types, stored)

    def _unequal_copies(self) -> list[Problem]:
        pairs = [(t.name, self._sources[t.parts[0].name][None].name) for t in self.plan.values() if t.copy]
        if self.model.tied:
            pairs.append((WHOLE["head.weight"], WHOLE["embedding.weight"]))
        return [
            Problem(copy, None, f"must equal {of}, which this model shares")
            for copy, of in pairs
            if copy in self._entries and not torch.equal(self._tensors.read(copy), self._tensors.read(of))
        ]


def _differences(of: Plan, entries: Mapping[str, Entry]) -> list[Problem]:
    """Tensors that are missing, misshapen, of a type that is no number of ours, or too many."""
    problems = [Problem(n, None, "is missing") for n, t in of.items() if n not in entries and not t.copy]
    for name, entry in entries.items():
        if name in of and entry.shape != of[name].shape:
            problems.append(Problem(name, list(entry.shape), "has another shape", str(list(of[name].shape))))
        if name in of and entry.dtype not in DTYPES:
            problems.append(Problem(name, entry.dtype, "is not a type of weights", ", ".join(DTYPES)))
        shared = name == WHOLE["head.weight"]  # with the embedding, where the model has no head
        if name not in of and not shared and not any(fnmatch.fnmatch(name, b) for b in BUFFERS):
            problems.append(Problem(name, None, "is no part of this model"))
    return problems


def export(
    weights: Weights,
    path: Path,
    *,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    positions: int = 4096,
    shard_bytes: int = SHARD_BYTES,
    beside: Mapping[str, bytes] | None = None,
    watch: Callable[[list[Shard]], Iterable[Shard]] = iter,
) -> None:
    """Write weights as a folder that transformers reads. Memory holds one file of at most `shard_bytes` (or one larger
    tensor). The folder appears when it is complete.

    `family`: None takes the first that fits. `dtype`: of everything but what stays float32 (routers, selection biases);
    None leaves each as it is. `positions`: `max_position_embeddings`, if RoPE is not scaled to more. `beside`: further
    files by name (a tokenizer). `watch` goes through the files of weights and may show how far it is.
    Raises WeightsError, before anything is written, where no family, or not this one, can say the model, and with all
    parameters that are missing, too many or misshapen.
    """
    kind = _family(weights.model, family)
    of, declared = plan(weights.model, kind)
    if problems := _unfit(declared, weights.meta):
        raise WeightsError("the weights", problems)
    dtypes = {n: _dtype_of(s, weights.meta[n], dtype) for n, s in declared.items()}
    sizes = {n: dtypes[t.parts[0].name].itemsize * math.prod(t.shape) for n, t in of.items()}
    files = shards(sizes, shard_bytes)
    config = write_config(weights.model, kind, positions) | {"torch_dtype": DTYPE_NAMES[dtypes["embedding.weight"]]}
    with new_folder(path) as folder:
        for shard in watch(files):
            tensors = {n: _made(weights, of[n], dtypes[of[n].parts[0].name]) for n in shard.names}
            write_shard(folder, shard.file, tensors)
        for name, content in (beside or {}).items():
            write_file(folder / name, content)
        write_index(folder, files, sizes)
        write_json(folder / CONFIG, config)


def _made(weights: Weights, of: Theirs, dtype: torch.dtype) -> Tensor:
    """Their tensor; no two of a file may share memory."""
    return to_theirs(weights.read, of, weights.model).to(dtype, copy=of.copy)


def _family(model: ModelConfig, family: str | None) -> str:
    if family is None:
        return family_of(model)
    if family not in FAMILIES:
        raise WeightsError("the export", [Problem("family", family, "is not known", ", ".join(FAMILIES))])
    if problems := misfits(model, family):
        raise WeightsError(f"the model as {family}", problems)
    return family


def _unfit(declared: Mapping[str, Spec], meta: Mapping[str, Tensor]) -> list[Problem]:
    problems = [Problem(name, None, "is missing") for name in declared if name not in meta]
    for name, tensor in meta.items():
        if name not in declared:
            problems.append(Problem(name, None, "is no part of this model"))
        elif tensor.shape != declared[name].shape:
            shape = str(list(declared[name].shape))
            problems.append(Problem(name, list(tensor.shape), "has another shape", shape))
    return problems


def _dtype_of(spec: Spec, tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None:
        return tensor.dtype
    return torch.promote_types(dtype, torch.float32) if spec.keep_float32 else dtype
