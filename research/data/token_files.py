"""Files that are already tokenised: a `.bin` with a sidecar, and the indexed pair of Megatron."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from research.data.corpus import Source, refuse

CHUNK = 1 << 22  # ids that are looked at at once
DTYPES = ("uint16", "uint32")  # of a sidecar
MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the dtype, sequences, entries of the document index
CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}  # those of whole numbers
MOST = 1 << 24  # ids of any vocabulary: more are a sign of a wrong dtype


@dataclass(frozen=True)
class Ids:
    """Ids as a file holds them, and where its documents begin."""

    ids: np.ndarray  # (tokens,) mapped read-only
    offsets: np.ndarray  # (documents + 1,) int64: document d is ids[offsets[d]:offsets[d+1]]
    counts: np.ndarray  # (V,) int64: how often each id occurs; V is the largest id + 1
    vocab_size: int  # every id is below it


def read_ids(source: Source) -> Ids:
    """The ids of a tokenised source. It reads the whole file once, in pieces. Raises ConfigError naming the file."""
    return _sidecar(*source.files) if source.kind == "sidecar" else _indexed(*source.files)


def _sidecar(path: Path, beside: Path) -> Ids:
    """NAME.bin is a flat array of ids in the machine's byte order; NAME.json says which: dtype, count, vocab_size,
    and `end`, the id that closes a document (null or absent: the file is one document)."""
    try:
        facts = json.loads(beside.read_text(encoding="utf-8"))
        dtype, count, vocab_size = facts["dtype"], facts["count"], facts["vocab_size"]
        end = facts.get("end")
        whole = all(type(n) is int and n > 0 for n in (count, vocab_size)) and type(end) in (int, type(None))
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        example = '{"dtype": "uint16", "count": 1000000, "vocab_size": 50257, "end": 50256}'
        refuse(beside, "is no sidecar of token ids", example)
    if dtype not in DTYPES:
        refuse(beside, f"has dtype {dtype!r}", ", ".join(DTYPES))
    ids = _mapped(path, dtype, count, beside)
    counts = np.zeros(0, np.int64)
    ends = [np.zeros(1, np.int64)]
    for begin, chunk in _chunks(ids):
        counts = _counted(path, begin, chunk, counts, vocab_size, f"the vocab_size={vocab_size} of {beside.name}")
        if end is not None:
            ends.append(np.flatnonzero(chunk == end) + begin + 1)
    if ends[-1].size == 0 or ends[-1][-1] != count:
        ends.append(np.array([count]))  # what follows the last `end`
    return Ids(ids, np.concatenate(ends), counts, vocab_size)


def _indexed(path: Path, index: Path) -> Ids:
    """NAME.bin holds sequences of ids; NAME.idx holds HEADER, then the length of each sequence (int32, ids), its place
    in the .bin (int64, bytes), and the first sequence of each document with a last entry for the end (int64)."""
    size = index.stat().st_size
    with index.open("rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        refuse(index, "is no Megatron index: it does not begin with MMIDIDX", "the .idx of the .bin")
    _, version, code, sequences, entries = HEADER.unpack(head)
    if version != 1:
        refuse(index, f"has version {version}", "version 1")
    if code not in CODES:
        refuse(index, f"has dtype code {code}", ", ".join(f"{c} ({name})" for c, name in CODES.items()))
    needed = HEADER.size + 12 * sequences + 8 * entries
    if size != needed:
        short = "is cut short" if size < needed else "is too long (multimodal indexes are not read)"
        refuse(index, f"{short}: {size} bytes, its header asks for {needed}", "the whole .idx")
    rest = np.memmap(index, np.uint8, "r", offset=HEADER.size)
    lengths = rest[: 4 * sequences].view("<i4")
    places = rest[4 * sequences : 12 * sequences].view("<i8")
    documents = rest[12 * sequences :].view("<i8")
    begins = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    itemsize = np.dtype(CODES[code]).itemsize
    if (lengths < 0).any() or (places != begins[:-1] * itemsize).any():
        refuse(index, "has sequences that do not follow each other in the .bin", "sequences end to end")
    if entries < 2 or documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
        refuse(index, f"has a document index that does not run from 0 to its {sequences} sequences", "the whole .idx")
    ids = _mapped(path, CODES[code], int(begins[-1]), index)
    counts = np.zeros(0, np.int64)
    for begin, chunk in _chunks(ids):
        counts = _counted(path, begin, chunk, counts, MOST, "any vocabulary")
    return Ids(ids, begins[documents], counts, len(counts))


def _mapped(path: Path, dtype: str, count: int, beside: Path) -> np.ndarray:
    size, itemsize = path.stat().st_size, np.dtype(dtype).itemsize
    if size != count * itemsize:
        rule = "is cut short" if size < count * itemsize else "is too long"
        asked = f"{beside.name} asks for {count} ids of {dtype}"
        refuse(path, f"{rule}: {size} bytes, {asked}", f"{count * itemsize} bytes")
    return np.memmap(path, dtype, "r", shape=(count,))


def _chunks(ids: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Place and copy of one piece after another."""
    for begin in range(0, len(ids), CHUNK):
        yield begin, np.array(ids[begin : begin + CHUNK])


def _counted(path: Path, begin: int, chunk: np.ndarray, counts: np.ndarray, limit: int, of: str) -> np.ndarray:
    """The counts of ids so far and of this piece. Raises ConfigError at the first id outside 0 to limit-1."""
    wrong = np.flatnonzero((chunk >= limit) | (chunk < 0))
    if wrong.size:
        rule = f"holds id {chunk[wrong[0]]} at place {begin + wrong[0]}, outside {of}"
        refuse(path, rule, f"ids from 0 to {limit - 1}, stored as {chunk.dtype}")
    return added(counts, chunk)


def added(counts: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Counts of ids (V,), longer where ids ask for it, with those of some more ids."""
    more = np.bincount(ids, minlength=len(counts)).astype(np.int64)
    more[: len(counts)] += counts
    return more
