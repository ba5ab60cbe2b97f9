"""The index of a checkpoint: which box of which tensor stands in which file, and what the files must hash to.

A checkpoint is a folder `step-00000020` with safetensors files and `index.json`, which is written last and in one
piece: without it there is no checkpoint, with it there is a whole one. Nothing here is a pickle.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from research.files import sync, write_atomically
from research.mesh import Box

INDEX = "index.json"
LISTED = 20  # problems in one message
PLACES = "the folder of a checkpoint or of a run"
OWN = re.compile(
    r"[0-9a-f]{8}-\d{5}-(weights|rest)\.safetensors|\.index\.json\..*"
)  # files that saves make, but the index
FORMAT = 1
DTYPES = {str(t).removeprefix("torch."): t for t in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
DTYPES |= {str(t).removeprefix("torch."): t for t in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)}


class CheckpointError(ValueError):
    """A checkpoint that is not there or does not fit, or one that could not be written."""


class DamagedError(CheckpointError):
    """A checkpoint that is not whole."""


def told(problems: Iterable[str]) -> str:
    """Problems as a list, each once, the first ones of many."""
    lines = list(dict.fromkeys(problems))
    more = [f"and {len(lines) - LISTED} more"] if len(lines) > LISTED else []
    return "".join(f"\n  - {line}" for line in [*lines[:LISTED], *more])


@dataclass(frozen=True)
class File:
    """What a file must be."""

    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Entry:
    """One global tensor: the boxes that it is stored in, each with the file that holds it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: dict[Box, str]


@dataclass(frozen=True)
class Index:
    """`number` orders the checkpoints of a folder as they were made. `state` is what is no tensor: step, config, .."""

    number: int
    state: Mapping[str, Any]
    files: Mapping[str, File] = field(default_factory=dict)
    tensors: Mapping[str, Entry] = field(default_factory=dict)


def stored_name(name: str, box: Box) -> str:
    """The name of a box inside its file; a tensor that starts at its origin keeps its own."""
    offsets = [offset for offset, _ in box]
    return f"{name}@{','.join(map(str, offsets))}" if any(offsets) else name


def write_index(folder: Path, index: Index) -> None:
    """The moment from which the checkpoint exists. Files of an earlier, unfinished save are removed after it."""
    content = {
        "format": FORMAT,
        "number": index.number,
        "state": index.state,
        "files": {name: [f.nbytes, f.sha256] for name, f in index.files.items()},
        "tensors": {
            name: {
                "dtype": str(e.dtype).removeprefix("torch."),
                "shape": e.shape,
                "boxes": [[*b, f] for b, f in e.boxes.items()],
            }
            for name, e in index.tensors.items()
        },
    }
    text = json.dumps(content)
    write_atomically(folder / INDEX, f'{{"sha256": "{_digest(text)}", "content": {text}}}'.encode())
    sync(folder)
    sync(folder.parent)  # before earlier checkpoints are pruned
    for path in folder.iterdir():
        if OWN.fullmatch(path.name) and path.name not in index.files:
            path.unlink()


def read_index(folder: Path) -> Index:
    """Raises CheckpointError naming the file where it is missing, altered, or of another format."""
    path = folder / INDEX
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DamagedError(f"{folder} is no complete checkpoint: it has no {INDEX}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedError(f"{path} cannot be read: {error}") from None
    found = re.fullmatch(r'\{"sha256": "([0-9a-f]{64})", "content": (.*)\}', text, re.DOTALL)
    if found is None or _digest(found[2]) != found[1]:
        raise DamagedError(f"{path} is truncated or was altered")
    content = json.loads(found[2])
    if content["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {content['format']}; legal: {FORMAT}")
    if any(Path(name).name != name for name in content["files"]):
        raise DamagedError(f"{path} names a file outside of the checkpoint")
    return Index(
        content["number"],
        content["state"],
        {name: File(*f) for name, f in content["files"].items()},
        {name: _entry(e) for name, e in content["tensors"].items()},
    )


def _entry(e: Mapping[str, Any]) -> Entry:
    boxes = {tuple((o, n) for o, n in b): f for *b, f in e["boxes"]}
    return Entry(DTYPES[e["dtype"]], tuple(e["shape"]), boxes)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def damage(folder: Path, names: Iterable[str], files: Mapping[str, File], contents: bool = True) -> Iterator[str]:
    """What is wrong with these files, each named. With `contents` all of their bytes are read; sizes alone tell what is
    missing or was cut short."""
    for name in names:
        path, wanted = folder / name, files[name]
        try:
            nbytes = path.stat().st_size
            if nbytes != wanted.nbytes:
                yield f"{path} has {nbytes} bytes instead of {wanted.nbytes}"
            elif contents and _checksum(path) != wanted.sha256:
                yield f"{path} was altered: its checksum differs"
        except OSError as error:
            yield f"{path} cannot be read: {error.strerror}"


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damaged(checkpoint: Path, problems: Iterable[str]) -> DamagedError:
    return DamagedError(f"{checkpoint} is damaged:{told(problems)}{_offer(checkpoint)}")


def open_index(checkpoint: Path) -> Index:
    """The index of the checkpoint that somebody asked for. Raises CheckpointError; of damage with what to use
    instead."""
    try:
        return read_index(checkpoint)
    except DamagedError as error:
        raise damaged(checkpoint, [str(error)]) from None


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def steps_in(folder: Path) -> list[Path]:
    """Folders of checkpoints in the folder of a run, complete or not, by step."""
    return sorted(p for p in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", p.name))


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints of a run, in the order in which they were made. One whose index is damaged comes last:
    it is to be named rather than passed over."""
    return sorted((p for p in steps_in(folder) if (p / INDEX).exists()), key=lambda p: (number_of(p), p.name))


def number_of(checkpoint: Path) -> float:
    try:
        return read_index(checkpoint).number
    except CheckpointError:
        return float("inf")


def prune(folder: Path, keep: int, keep_every: int) -> None:
    """Remove all but the last `keep` complete checkpoints (0: all stay) and those whose step `keep_every` divides; and
    what saves that never ended have left. A damaged one stays, for someone to look at, and does not count as kept."""
    sound = [p for p in complete(folder) if number_of(p) < float("inf")]
    old = sound[: max(len(sound) - keep, 0)] if keep else []
    for path in old:
        if not keep_every or int(path.name.partition("-")[2]) % keep_every:
            remove(path)
    for path in steps_in(folder):
        if not (path / INDEX).exists():
            remove(path)


def remove(checkpoint: Path) -> None:
    """Its index first: what is left of a removal that was cut short is no checkpoint. Files that no save wrote stay."""
    (checkpoint / INDEX).unlink(missing_ok=True)
    for path in checkpoint.iterdir():
        if OWN.fullmatch(path.name):
            path.unlink()
    with contextlib.suppress(OSError):
        checkpoint.rmdir()


def newest(place: Path) -> Path | None:
    """The checkpoint that a path means: itself, or the newest complete one of a run's folder; None where there is
    none."""
    if (place / INDEX).exists():
        return place
    found = complete(place)
    return found[-1] if found else None


def find(place: Path, legal: str = PLACES) -> Path:
    """As `newest`. Raises CheckpointError where there is none."""
    checkpoint = newest(place)
    if checkpoint is None:
        raise CheckpointError(f"{place} {absence(place)}; legal: {legal}")
    return checkpoint


def absence(place: Path) -> str:
    """Why a path means no checkpoint."""
    if not place.exists():
        return "does not exist"
    return "holds no complete checkpoint" if place.is_dir() else "is no folder"


def _offer(checkpoint: Path) -> str:
    """What to use instead of a damaged checkpoint: the complete one before it, or else after it, as far as names and
    sizes tell."""
    beside = complete(checkpoint.parent)
    at = next((i for i, p in enumerate(beside) if p.samefile(checkpoint)), len(beside))
    for where, others in (("before", beside[:at][::-1]), ("after", beside[at + 1 :])):
        for path in others:
            with contextlib.suppress(CheckpointError):
                files = read_index(path).files
                if not any(damage(path, files, files, contents=False)):
                    return f"; the complete checkpoint {where} it is {path}"
    return "; there is no other complete checkpoint beside it"
