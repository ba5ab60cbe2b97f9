"""Safetensors files, written piece by piece: never twice in memory, hashed on the way, and without haste.

safetensors' own writer takes a core for as long as it lasts, which the training beside it may need. Files are read with
safetensors. Format: https://huggingface.co/docs/safetensors#format
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from research.train.checkpoint.index import CheckpointError, File

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
}
CHUNK_BYTES = 2**22


class Pace:
    """Rests as long as keeps the work at `share` of a core, until somebody waits for its end (`hurry`)."""

    def __init__(self, share: float = 1.0) -> None:
        self._rest, self._hurry = 1 / share - 1, threading.Event()

    def hurry(self) -> None:
        self._hurry.set()

    def rest(self, worked_s: float) -> None:
        if self._rest:
            self._hurry.wait(worked_s * self._rest)


def write_file(folder: Path, name: str, tensors: Mapping[str, Tensor], pace: Pace) -> File:
    """Write a file, wait until it is on the disk, and say what it must hash to. Tensors may lie anywhere; on the host
    they are best. Raises CheckpointError naming the file."""
    path, sha256 = folder / name, hashlib.sha256()
    try:
        with path.open("wb", buffering=0) as file:
            for chunk in _chunks(tensors):
                begin = time.thread_time()
                sha256.update(chunk)
                while len(chunk):
                    chunk = chunk[file.write(chunk) :]
                pace.rest(time.thread_time() - begin)
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from error
    return File(path.stat().st_size, sha256.hexdigest())


def _chunks(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """The bytes of a file: length of the header, header, values."""
    header, end = {}, 0
    for name, t in tensors.items():
        begin, end = end, end + t.nbytes
        header[name] = {"dtype": NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for t in tensors.values():
        values = t.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy().data
        for low in range(0, len(values), CHUNK_BYTES):
            yield values[low : low + CHUNK_BYTES]
