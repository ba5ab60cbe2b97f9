"""Files of ids: a sidecar, the index of Megatron, and everything that can be wrong with them."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from research.config import DataConfig, RunConfig, replace
from research.data import token_files
from research.data.corpus import problems
from research.data.tokenizers import Bytes
from research.data.tokens import open_tokens
from research.settings import from_mapping
from research.train.run import global_batches
from tests.data.forms import DOCUMENTS, ids_of, megatron, sidecar


def opened(path: Path) -> list[list[int]]:
    (found,) = open_tokens(DataConfig(path=(str(path),), cache=str(path.parent / "cache"))).sources
    return [found.ids[a:b].tolist() for a, b in zip(found.offsets, found.offsets[1:], strict=False)]


@pytest.mark.parametrize(
    ("ids", "documents"),
    [
        ([1, 2, 9, 3, 9], [[1, 2, 9], [3, 9]]),
        ([1, 9, 9, 3, 4], [[1, 9], [9], [3, 4]]),  # what follows the last end is a document too
        ([9], [[9]]),
        ([1, 2, 3], [[1, 2, 3]]),
    ],
)
@pytest.mark.parametrize("chunk", [1, 2, 1 << 20])
def test_documents_end_with_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ids: list[int], documents: list[list[int]], chunk: int
) -> None:
    monkeypatch.setattr(token_files, "CHUNK", chunk)
    np.array(ids, np.uint16).tofile(tmp_path / "a.bin")
    facts = {"dtype": "uint16", "count": len(ids), "vocab_size": 10}
    (tmp_path / "a.json").write_text(json.dumps(facts | {"end": 9}))
    assert opened(tmp_path / "a.bin") == documents
    (tmp_path / "a.json").write_text(json.dumps(facts))
    assert opened(tmp_path / "a.bin") == [ids]


def test_the_index_tells_documents_without_an_end(tmp_path: Path) -> None:
    """Boundaries come from the index alone: nothing closes these documents."""
    np.arange(10, dtype=np.uint16).tofile(tmp_path / "m.bin")
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 4, 4)
    index += np.array([2, 3, 0, 5], "<i4").tobytes() + np.array([0, 4, 10, 10], "<i8").tobytes()
    (tmp_path / "m.idx").write_bytes(index + np.array([0, 1, 3, 4], "<i8").tobytes())
    assert opened(tmp_path / "m") == [[0, 1], [2, 3, 4], [5, 6, 7, 8, 9]]
    words = [f"data.path={tmp_path / 'm'}", f"data.cache={tmp_path}/cache", "data.sequence=9", "train.global_batch=1"]
    config = from_mapping({}, [*words, "model.vocab=10"], [problems])
    (batch,) = global_batches(config, open_tokens(config.data)).microbatches_of(0)
    assert batch.tokens.tolist() == [[*range(9)]]
    assert batch.targets.tolist() == [[1, -100, 3, 4, -100, 6, 7, 8, 9]]


WIDTHS = {1: np.uint8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


@pytest.mark.parametrize("code", WIDTHS)
def test_every_width_of_an_index(tmp_path: Path, code: int) -> None:
    documents = opened(megatron(tmp_path, DOCUMENTS, code, WIDTHS[code]))
    assert [i for d in documents for i in d] == ids_of(DOCUMENTS).tolist()


def cut(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda at: (at / name).write_bytes(change((at / name).read_bytes())) and None


def facts(**changes: object) -> Callable[[Path], None]:
    def write(at: Path) -> None:
        whole = json.loads((at / "ids.json").read_text()) | changes
        (at / "ids.json").write_text(json.dumps({k: v for k, v in whole.items() if v != "gone"}))

    return write


def at(place: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content[:place] + value + content[place + len(value) :]


SIDECAR = [
    ("ids.bin", lambda p: (p / "ids.bin").unlink(), "does not exist"),
    ("ids.json", lambda p: (p / "ids.json").unlink(), "does not exist, and data.path="),
    ("ids.bin", cut("ids.bin", lambda b: b""), "is empty"),
    ("ids.bin", cut("ids.bin", lambda b: b[:-1]), "is cut short: "),
    ("ids.bin", cut("ids.bin", lambda b: b[:-2]), "is cut short: "),
    ("ids.bin", cut("ids.bin", lambda b: b + b"\0\0"), "is too long: "),
    ("ids.json", cut("ids.json", lambda b: b[:-1]), "is no sidecar of token ids"),
    ("ids.json", cut("ids.json", lambda b: b"[]"), "is no sidecar of token ids"),
    ("ids.json", facts(count="gone"), "is no sidecar of token ids"),
    ("ids.json", facts(vocab_size="many"), "is no sidecar of token ids"),
    ("ids.json", facts(dtype="int64"), "has dtype 'int64'; legal: uint16, uint32"),
    ("ids.json", facts(dtype=["uint16"]), "has dtype ['uint16']; legal: uint16, uint32"),
    ("ids.bin", facts(dtype="uint32"), "is cut short: "),
    ("ids.bin", facts(vocab_size=245), "holds id 245 at place "),
]
INDEX = [
    ("mega.bin", lambda p: (p / "mega.bin").unlink(), "does not exist"),
    ("mega.idx", cut("mega.idx", lambda b: b""), "is empty"),
    ("mega.idx", cut("mega.idx", lambda b: b[:30]), "is no Megatron index"),
    ("mega.idx", cut("mega.idx", at(0, b"X")), "is no Megatron index"),
    ("mega.idx", cut("mega.idx", at(9, b"\2")), "has version 2"),
    ("mega.idx", cut("mega.idx", at(17, b"\7")), "has dtype code 7; legal: 1 (uint8)"),
    ("mega.idx", cut("mega.idx", lambda b: b[:-8]), "is cut short: "),
    ("mega.idx", cut("mega.idx", lambda b: b + b"\0" * 7), "is too long"),
    ("mega.idx", cut("mega.idx", at(34, b"\1")), "has sequences that do not follow each other"),
    ("mega.idx", cut("mega.idx", at(34, b"\xff\xff\xff\xff")), "has sequences that do not follow each other"),
    ("mega.idx", cut("mega.idx", lambda b: b[:-8] + b"\1" + b"\0" * 7), "has a document index that does not run"),
    ("mega.bin", cut("mega.bin", lambda b: b[:-2]), "is cut short: "),
    ("mega.idx", cut("mega.idx", at(17, b"\1")), "has sequences that do not follow each other"),
]


@pytest.mark.parametrize(
    ("write", "name", "spoil", "rule"), [(sidecar, *case) for case in SIDECAR] + [(megatron, *case) for case in INDEX]
)
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, write: Callable[..., Path], name: str, spoil: Callable[[Path], None], rule: str
) -> None:
    path = write(tmp_path, DOCUMENTS)
    spoil(tmp_path)
    with pytest.raises(ValueError, match="1 problem in the config") as error:
        opened(path)
    assert f"data.path={tmp_path / name} {rule}" in str(error.value)


def test_ids_of_the_wrong_width_or_sign_are_seen(tmp_path: Path) -> None:
    path = megatron(tmp_path, DOCUMENTS, 4, np.int32)
    content = np.fromfile(path, np.int32)
    content[5] = -1
    content.tofile(path)
    with pytest.raises(ValueError, match=r"mega\.bin holds id -1 at place 5"):
        opened(path)
    content[5] = 1 << 24
    content.tofile(path)
    with pytest.raises(ValueError, match=r"mega\.bin holds id 16777216 at place 5, outside any vocabulary"):
        opened(path)
    np.concatenate([ids_of(DOCUMENTS), ids_of(DOCUMENTS)]).tofile(tmp_path / "ids.bin")  # really uint16
    count = len(ids_of(DOCUMENTS))
    (tmp_path / "ids.json").write_text(json.dumps({"dtype": "uint32", "count": count, "vocab_size": 246}))
    with pytest.raises(ValueError, match=r"ids\.bin holds id \d+ at place 0, outside the vocab_size=246 of ids\.json"):
        opened(tmp_path / "ids.bin")


@pytest.mark.parametrize("write", [sidecar, megatron])
def test_ids_past_the_vocabulary_of_the_model(tmp_path: Path, write: Callable[..., Path]) -> None:
    data = {"data.path": (str(write(tmp_path, DOCUMENTS)),), "data.cache": str(tmp_path / "cache"), "data.sequence": 4}
    config = replace(RunConfig(), {**data, "model.vocab": Bytes.end, "train.global_batch": 1})
    assert not list(problems(config))  # the tokenizer does not matter
    corpus = open_tokens(config.data)
    with pytest.raises(ValueError, match=r"model\.vocab=245 has no row for id 245 of .*\.bin; legal: at least 246"):
        global_batches(config, corpus)
    global_batches(replace(config, {"model.vocab": Bytes.end + 1}), corpus)


def test_a_trained_tokenizer_does_not_go_with_ids(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    paths = (str(tmp_path / "a.txt"), str(sidecar(tmp_path, DOCUMENTS)))
    config = replace(RunConfig(), {"data.path": paths, "data.tokenizer": "bpe", "model.vocab": 5000})
    assert "cannot be trained beside the ids of" in str(next(problems(config)))
