"""The same documents in every form that `data.path` takes."""

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from research.data.tokenizers import Bytes

DOCUMENTS = ["the cat\r\nsat \U0001f600", "on the mat", "x", "na\u00efve \u4f60\u597d \n\n", "the end of it\n"]

Write = Callable[[Path, Sequence[str]], Path]


def folder(at: Path, documents: Sequence[str]) -> Path:
    """Files whose order by path is not the order of their making."""
    for i in reversed(range(len(documents))):
        path = at / "folder" / f"{i // 2}" / f"part-{i}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(documents[i].encode())
    (at / "folder" / ".hidden").write_text("not this")
    return at / "folder"


def globbed(at: Path, documents: Sequence[str]) -> Path:
    folder(at, documents)
    return at / "folder" / "**" / "part-*"


def jsonl(at: Path, documents: Sequence[str], field: str = "text") -> Path:
    lines = [json.dumps({"id": i, field: d}, ensure_ascii=i % 2 == 0) for i, d in enumerate(documents)]
    (at / "lines.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return at / "lines.jsonl"


def rows(at: Path, documents: Sequence[str], field: str = "text") -> Path:
    table = pa.table({"id": range(len(documents)), field: list(documents)})
    parquet.write_table(table, at / "rows.parquet", row_group_size=2)
    return at / "rows.parquet"


def ids_of(documents: Sequence[str], dtype: type = np.uint16) -> np.ndarray:
    pieces = [np.append(Bytes().encode(d), Bytes.end).astype(dtype) for d in documents]
    return np.concatenate(pieces)


def sidecar(at: Path, documents: Sequence[str], dtype: type = np.uint16, **facts: object) -> Path:
    ids = ids_of(documents, dtype)
    ids.tofile(at / "ids.bin")
    whole = {"dtype": np.dtype(dtype).name, "count": len(ids), "vocab_size": Bytes.vocab_size, "end": Bytes.end}
    (at / "ids.json").write_text(json.dumps(whole | facts))
    return at / "ids.bin"


def wide(at: Path, documents: Sequence[str]) -> Path:
    return sidecar(at, documents, np.uint32)


def megatron(at: Path, documents: Sequence[str], code: int = 8, dtype: type = np.uint16) -> Path:
    """Every document as one or two sequences, byte by byte from the public description of the format."""
    pieces, first = [], [0]
    for i, d in enumerate(documents):
        ids = ids_of([d], dtype)
        pieces += [ids[:3], ids[3:]] if i % 2 else [ids]
        first.append(len(pieces))
    (at / "mega.bin").write_bytes(b"".join(p.tobytes() for p in pieces))
    places = np.cumsum([0, *(p.nbytes for p in pieces)])[:-1]
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    index += struct.pack("<Q", len(pieces)) + struct.pack("<Q", len(first))
    index += np.array([len(p) for p in pieces], "<i4").tobytes()
    index += np.array(places, "<i8").tobytes() + np.array(first, "<i8").tobytes()
    (at / "mega.idx").write_bytes(index)
    return at / "mega.bin"


def prefix(at: Path, documents: Sequence[str]) -> Path:
    return megatron(at, documents).with_suffix("")


def int32(at: Path, documents: Sequence[str]) -> Path:
    return megatron(at, documents, 4, np.int32).with_suffix(".idx")


OF_TEXT: tuple[Write, ...] = (folder, globbed, jsonl, rows)
OF_IDS: tuple[Write, ...] = (sidecar, wide, megatron, prefix, int32)
