"""Folders of safetensors files: one `model.safetensors`, or shards with `model.safetensors.index.json`.

Headers say names, shapes and dtypes; values are read one tensor at a time. No pickle is ever opened.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from research.files import sync
from research.problems import Problem, WeightsError

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
TOKENIZER, TOKENIZER_CONFIG, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Entry(NamedTuple):
    file: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors says it


class Tensors:
    """The tensors of a folder. Raises WeightsError with everything that is wrong with its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: tuple[str, Any] = ("", None)
        problems: list[Problem] = []
        self.entries = _entries(folder, problems)
        if problems:
            raise WeightsError(str(folder), problems)

    def read(self, name: str) -> Tensor:
        """A view of its file."""
        file = self.entries[name].file
        if file != self._open[0]:
            self._open = ("", None)  # close it before the next one is mapped
            self._open = (file, safe_open(self.folder / file, framework="pt"))
        tensor: Tensor = self._open[1].get_tensor(name)
        return tensor


def read_json(path: Path) -> Mapping[str, Any]:
    """A mapping; raises WeightsError where the file holds none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightsError(str(path.parent), [Problem(path.name, None, "is missing")]) from None
    except (OSError, ValueError) as error:
        raise WeightsError(str(path.parent), [Problem(path.name, None, f"cannot be read: {error}")]) from error
    if not isinstance(found, dict):
        raise WeightsError(str(path.parent), [Problem(path.name, None, "holds no mapping")])
    return found


def _entries(folder: Path, problems: list[Problem]) -> dict[str, Entry]:
    """Every tensor of the files that count, by name."""
    if (folder / INDEX).is_file():
        listed = read_json(folder / INDEX).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(f, str) for f in listed.values()):
            problems.append(Problem(INDEX, None, "holds no weight_map of tensors to files"))
            return {}
    elif (folder / SINGLE).is_file():
        listed = None
    else:
        legal = f"{SINGLE}, or {INDEX} with its files; other formats may run code"
        problems.append(Problem(str(folder), None, "holds no safetensors", legal))
        return {}
    entries: dict[str, Entry] = {}
    for file in sorted(set(listed.values())) if listed else [SINGLE]:
        if file != Path(file).name:
            problems.append(Problem(INDEX, file, "is not the name of a file in the folder"))
            continue
        for name, entry in _header(folder, file, problems).items():
            if name in entries:
                problems.append(Problem(name, None, f"is in {entries[name].file} and in {file}"))
            entries[name] = entry
    for name, file in (listed or {}).items():
        if name in entries and entries[name].file != file:
            problems.append(Problem(name, None, f"is in {entries[name].file}, {INDEX} says {file}"))
        elif name not in entries and not any(p.key == file for p in problems):
            problems.append(Problem(name, None, f"is not in {file}, as {INDEX} says"))
    return entries


def _header(folder: Path, file: str, problems: list[Problem]) -> dict[str, Entry]:
    try:
        with safe_open(folder / file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
            return {n: Entry(file, tuple(s.get_shape()), s.get_dtype()) for n, s in slices.items()}
    except FileNotFoundError:
        problems.append(Problem(file, None, "is missing"))
    except (OSError, SafetensorError) as error:
        problems.append(Problem(file, None, f"is damaged: {error}"))
    return {}


@dataclass(frozen=True)
class Shard:
    """What one file will hold."""

    file: str
    names: tuple[str, ...]


def shards(sizes: Mapping[str, int], limit: int) -> list[Shard]:
    """Files of at most `limit` bytes, in order; a tensor that is larger has one of its own."""
    groups: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not groups or filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return [Shard(SINGLE, tuple(groups[0]))]
    of = len(groups)
    return [Shard(f"model-{i:05}-of-{of:05}.safetensors", tuple(g)) for i, g in enumerate(groups, 1)]


def write_shard(folder: Path, file: str, tensors: Mapping[str, Tensor]) -> None:
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / file, {"format": "pt"})
    sync(folder / file)


def write_json(path: Path, tree: Mapping[str, Any]) -> None:
    write_file(path, json_file(tree))


def json_file(tree: Mapping[str, Any]) -> bytes:
    return (json.dumps(tree, indent=2) + "\n").encode()


def write_file(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    sync(path)


def write_index(folder: Path, of: Sequence[Shard], sizes: Mapping[str, int]) -> None:
    """The index of more than one file."""
    if len(of) > 1:
        listed = {name: shard.file for shard in of for name in shard.names}
        write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": listed})


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """An empty folder that is at `path` when the block ends, and nowhere if it fails. Raises WeightsError where
    `path` is taken or cannot be made."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise WeightsError(str(path), [Problem(str(path), None, "exists already", "a new or an empty folder")])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    except OSError as error:
        raise WeightsError(str(path), [Problem(str(path), None, f"cannot be made: {error.strerror}")]) from error
    try:
        yield making
        making.chmod(0o755)
        making.replace(path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise
