"""The cache: right, whole, built once, and never older than its text."""

import json
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from research.config import DataConfig
from research.data import tokens
from research.data.corpus import documents
from research.data.tokenizers import Bytes
from research.data.tokens import open_tokenizer, open_tokens
from research.record import write_atomically

TEXT = "the cat sat on the mat \U0001f600\n" * 20


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    (tmp_path / "some.text.txt").write_text(TEXT, encoding="utf-8")
    return DataConfig(path=str(tmp_path / "some.text.txt"), cache=str(tmp_path / "deep" / "cache"), bpe_vocab=270)


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that gains one byte for every build, in forked processes too."""
    log, build = tmp_path / "builds", tokens._build

    def counted(*args: object) -> None:
        with log.open("a") as file:
            file.write("x")
        time.sleep(0.1)  # so that processes started together meet
        build(*args)  # type: ignore[arg-type]

    log.touch()
    monkeypatch.setattr(tokens, "_build", counted)
    return log


def cached(data: DataConfig, suffix: str) -> Path:
    (path,) = Path(data.cache).glob(f"*{data.tokenizer}*{suffix}")
    return path


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_the_stream_is_the_text_and_its_end(data: DataConfig, kind: str) -> None:
    data = replace(data, tokenizer=kind)  # type: ignore[arg-type]
    found, tokenizer = open_tokens(data), open_tokenizer(data)
    ids = found.ids.tolist()
    assert isinstance(found.ids, np.memmap) and not found.ids.flags.writeable and found.ids.dtype == np.uint16
    assert ids == [*tokenizer.encode(TEXT).tolist(), tokenizer.end] and tokenizer.decode(ids) == TEXT
    assert (found.vocab_size, found.end) == (tokenizer.vocab_size, tokenizer.end)
    assert found.text_bytes == len(TEXT.encode()) and found.path == data.path
    shares = [n / len(ids) for n in Counter(ids).values()]
    assert math.isclose(found.unigram_entropy, -sum(p * math.log(p) for p in shares), rel_tol=1e-12)


def test_every_document_is_closed(data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "documents", lambda path: iter(["ab", "", "c"]))
    assert open_tokens(data).ids.tolist() == [97, 98, 245, 245, 99, 245]


def test_a_large_vocabulary_gets_wide_ids(data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bytes, "vocab_size", (1 << 16) + 1)
    monkeypatch.setattr(Bytes, "end", 1 << 16)
    found = open_tokens(data)
    assert found.ids.dtype == np.uint32 and found.ids[-1] == 1 << 16


def test_the_cache_is_used_until_text_or_tokenizer_change(data: DataConfig, builds: Path) -> None:
    def built(data: DataConfig) -> int:
        """How many builds opening takes."""
        before = builds.stat().st_size
        open_tokens(data)
        return builds.stat().st_size - before

    file = Path(data.path)
    assert [built(data), built(data)] == [1, 0]
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_text(TEXT.replace("cat", "dog"), encoding="utf-8")
    os.utime(file, ns=times)  # the same size and the same times: only the contents tell
    assert built(data) == 1 and b"dog" in bytes(open_tokens(data).ids.astype(np.uint8))
    bpe = replace(data, tokenizer="bpe")
    assert [built(bpe), built(bpe), built(replace(bpe, bpe_vocab=271))] == [1, 0, 1]
    file.write_text(TEXT, encoding="utf-8")
    assert built(data) == 0  # the first text again


def test_where_documents_end_belongs_to_the_text(data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for texts, ids in ((["ab", "c"], [97, 98, 245, 99, 245]), (["a", "bc"], [97, 245, 98, 99, 245])):
        monkeypatch.setattr(tokens, "documents", lambda path, texts=texts: iter(texts))
        assert open_tokens(data).ids.tolist() == ids


@pytest.mark.parametrize(
    ("suffix", "keep"),  # how much of the file is left: None removes it
    [
        (".bin", -1),
        (".bin", -2),
        (".bin", 0),
        (".bin", None),
        (".json", -1),
        (".json", 0),
        (".json", None),
        (".tokenizer.json", None),
    ],
)
def test_damaged_files_are_rebuilt(data: DataConfig, builds: Path, suffix: str, keep: int | None) -> None:
    data = replace(data, tokenizer="bpe")
    whole = open_tokens(data).ids.tolist()
    (path,) = (p for p in Path(data.cache).iterdir() if p.name.partition("-bpe-")[2][12:] == suffix)
    if keep is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:keep])
    assert open_tokens(data).ids.tolist() == whole
    assert builds.read_text() == "xx"


def test_a_crash_before_the_sidecar_leaves_no_cache(data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(path: Path, content: bytes) -> None:
        if path.suffix == ".json":
            raise KeyboardInterrupt
        write_atomically(path, content)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tokens, "write_atomically", crash)
        open_tokens(data)
    assert cached(data, ".bin").exists() and not list(Path(data.cache).glob("*.json"))
    assert tokens._load(cached(data, ".bin").with_suffix(""), data.path) is None
    assert open_tokens(data).text_bytes == len(TEXT.encode())


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_four_processes_build_once(data: DataConfig, builds: Path, kind: str) -> None:
    data = replace(data, tokenizer=kind)  # type: ignore[arg-type]
    begin_read, begin_write = os.pipe()
    children = []
    for _ in range(4):
        children.append(os.fork())
        if children[-1] == 0:
            code = 1
            try:
                os.close(begin_write)
                os.read(begin_read, 1)  # returns in all children when the parent closes its end
                code = int(open_tokens(data).text_bytes != len(TEXT.encode()))
            finally:
                os._exit(code)
    os.close(begin_read)
    os.close(begin_write)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert builds.read_text() == "x"


def test_a_file_that_cannot_be_used_is_named(data: DataConfig) -> None:
    with pytest.raises(ValueError, match=r"gone\.txt does not exist"):
        open_tokens(replace(data, path=data.path + ".gone.txt"))


def test_nothing_is_shown_without_a_terminal(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tokens, "SILENT_S", 0)
    open_tokens(data)
    assert capfd.readouterr() == ("", "")


def test_the_standard_library(tmp_path: Path) -> None:
    begun = time.monotonic()
    data = DataConfig(cache=str(tmp_path))
    found = open_tokens(data)
    texts: Sequence[str] = list(documents("stdlib"))
    assert time.monotonic() - begun < 10
    assert len(texts) > 300 and found.text_bytes > 5e6
    assert len(found.ids) == found.text_bytes + len(texts) and (found.ids == found.end).sum() == len(texts)
    assert 2.5 < found.unigram_entropy < 4
    json.loads(cached(data, ".json").read_text())
