"""The cache: right, whole, built once, and never older than its text; the same ids from every form of a corpus."""

import hashlib
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from research.config import DataConfig, RunConfig
from research.data import tokens
from research.data.corpus import documents, find, problems
from research.data.tokenizers import Bytes, Library
from research.data.tokens import Tokens, open_tokenizer, open_tokens
from research.files import write_atomically
from research.train.run import global_batches
from tests.data.forms import DOCUMENTS, OF_IDS, OF_TEXT, Write, ids_of, jsonl, megatron, rows, sidecar

TEXT = "the cat sat on the mat \U0001f600\n" * 20


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    (tmp_path / "some.text.txt").write_text(TEXT, encoding="utf-8")
    return DataConfig(path=(str(tmp_path / "some.text.txt"),), cache=str(tmp_path / "deep" / "cache"), bpe_vocab=270)


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that gains one byte for every tokenised source, in forked processes too."""
    log, build = tmp_path / "builds", tokens._tokenise

    def counted(*args: object) -> None:
        with log.open("a") as file:
            file.write("x")
        time.sleep(0.1)  # so that processes started together meet
        build(*args)  # type: ignore[arg-type]

    log.touch()
    monkeypatch.setattr(tokens, "_tokenise", counted)
    return log


def only(data: DataConfig) -> Tokens:
    (found,) = open_tokens(data).sources
    return found


def cached(data: DataConfig, suffix: str) -> Path:
    (path,) = Path(data.cache).glob(f"*{suffix}")
    return path


def texts_of(found: Tokens) -> list[str]:
    return [Bytes().decode(found.ids[a:b].tolist()) for a, b in zip(found.offsets, found.offsets[1:], strict=False)]


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_the_stream_is_the_text_and_its_end(data: DataConfig, kind: str) -> None:
    data = replace(data, tokenizer=kind)
    found, tokenizer = only(data), open_tokenizer(data)
    ids = found.ids.tolist()
    assert isinstance(found.ids, np.memmap) and not found.ids.flags.writeable and found.ids.dtype == np.uint16
    assert ids == [*tokenizer.encode(TEXT).tolist(), tokenizer.end] and tokenizer.decode(ids) == TEXT
    assert found.vocab_size == tokenizer.vocab_size and found.offsets.tolist() == [0, len(ids)]
    assert found.text_bytes == len(TEXT.encode()) and (found.path,) == data.path
    assert dict(enumerate(found.counts.tolist())) == {i: ids.count(i) for i in range(max(ids) + 1)}
    shares = [n / len(ids) for n in Counter(ids).values()]
    entropy = open_tokens(data).unigram_entropy
    assert math.isclose(entropy, -sum(p * math.log(p) for p in shares), rel_tol=1e-12)


@pytest.mark.parametrize("write", OF_TEXT)
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_every_form_of_text_gives_the_same_tokens(tmp_path: Path, write: Write, kind: str) -> None:
    path = write(tmp_path, DOCUMENTS)
    data = DataConfig(path=(str(path),), cache=str(tmp_path / "cache"), tokenizer=kind, bpe_vocab=300)
    found, tokenizer = only(data), open_tokenizer(data)
    sizes = [len(d.encode()) for d in DOCUMENTS]
    if kind == "bytes":
        assert found.ids.tolist() == ids_of(DOCUMENTS).tolist() and texts_of(found) == DOCUMENTS
    else:
        assert tokenizer.identity == Library.train(DOCUMENTS, 300).identity  # and so are the ids
        assert found.ids.tolist() == [i for d in DOCUMENTS for i in [*tokenizer.encode(d).tolist(), tokenizer.end]]
    assert found.byte_offsets is not None and np.diff(found.byte_offsets).tolist() == sizes
    assert open_tokens(data).text_bytes == sum(sizes)


@pytest.mark.parametrize("write", OF_IDS)
def test_every_form_of_ids_gives_the_same_tokens(tmp_path: Path, write: Write) -> None:
    data = DataConfig(path=(str(write(tmp_path, DOCUMENTS)),), cache=str(tmp_path / "cache"))
    found = only(data)
    assert isinstance(found.ids, np.memmap) and not found.ids.flags.writeable
    assert found.ids.tolist() == ids_of(DOCUMENTS).tolist() and texts_of(found) == DOCUMENTS
    assert found.counts.tolist() == np.bincount(ids_of(DOCUMENTS)).tolist()
    assert found.text_bytes is None and not list(Path(data.cache).glob("*.bin"))  # used where they are


def test_every_form_gives_the_same_batches(tmp_path: Path) -> None:
    documents = [d * 9 for d in DOCUMENTS]
    seen = set()
    for number, write in enumerate([*OF_TEXT, *OF_IDS]):
        folder = tmp_path / str(number)
        folder.mkdir()
        data = DataConfig(path=(str(write(folder, documents)),), cache=str(folder / "cache"), sequence=16, heldout=0.4)
        config = replace(RunConfig(), data=data, train=replace(RunConfig().train, global_batch=4))
        (batch,) = global_batches(config, open_tokens(data)).microbatches_of(7)
        seen.add(str([batch.tokens.tolist(), batch.targets.tolist()]))
    assert len(seen) == 1


@pytest.mark.parametrize("flush", [1, 7, 1 << 20])
def test_every_document_is_closed(data: DataConfig, monkeypatch: pytest.MonkeyPatch, flush: int) -> None:
    """However the pieces are cut that are written."""
    monkeypatch.setattr(tokens, "FLUSH", flush)
    path = jsonl(Path(data.path[0]).parent, ["ab", "", "c", "defghijkl"])
    found = only(replace(data, path=(str(path),)))
    assert found.ids.tolist() == [97, 98, 245, 245, 99, 245, *range(100, 109), 245]
    assert found.offsets.tolist() == [0, 3, 4, 6, 16] and found.byte_offsets.tolist() == [0, 2, 2, 3, 12]  # type: ignore[union-attr]
    assert found.counts.sum() == 16 and found.counts[245] == 4


def test_a_large_vocabulary_gets_wide_ids(data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bytes, "vocab_size", (1 << 16) + 1)
    monkeypatch.setattr(Bytes, "end", 1 << 16)
    found = only(data)
    assert found.ids.dtype == np.uint32 and found.ids[-1] == 1 << 16


def test_the_cache_is_used_until_text_or_tokenizer_change(data: DataConfig, builds: Path) -> None:
    def built(data: DataConfig) -> int:
        """How many builds opening takes."""
        before = builds.stat().st_size
        open_tokens(data)
        return builds.stat().st_size - before

    file = Path(data.path[0])
    assert [built(data), built(data)] == [1, 0]
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_text(TEXT.replace("cat", "dog"), encoding="utf-8")
    os.utime(file, ns=times)  # the same size and the same times: only the contents tell
    assert built(data) == 1 and b"dog" in bytes(only(data).ids.astype(np.uint8))
    bpe = replace(data, tokenizer="bpe")
    assert [built(bpe), built(bpe), built(replace(bpe, bpe_vocab=271))] == [1, 0, 1]
    file.write_text(TEXT, encoding="utf-8")
    assert built(data) == 0  # the first text again
    lines = file.with_name("a.jsonl")
    lines.write_text('{"text": "ab", "other": "cd"}')
    fields = [replace(data, path=(str(lines),), text_field=f) for f in ("text", "other", "text")]
    assert [built(f) for f in fields] == [1, 1, 0]
    assert [texts_of(only(f))[0] for f in fields] == ["ab", "cd", "ab"]


def test_the_digest_tells_which_field_is_read(data: DataConfig) -> None:
    """Of text alone it is that of contents and tokenizer, whatever the field is called."""
    lines = Path(data.path[0]).with_name("a.jsonl")
    lines.write_text('{"text": "ab", "b": "cd"}')
    for path, digests in (((str(lines),), 2), ((*data.path, str(lines)), 2), (data.path, 1)):
        found = [open_tokens(replace(data, path=path, text_field=f)).digest for f in ("text", "b", "text")]
        assert len(set(found)) == digests and found[0] == found[2]
    what = [*(tokens._content_hash(find(p), Path(data.cache)) for p in data.path), Bytes().identity]
    assert found[0] == hashlib.sha256("\n".join(what).encode()).hexdigest()[:16]


def test_a_source_is_hashed_again_only_when_a_file_changed(data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change within a tick of the file system's clock is seen too: a hash of what is that new is not kept."""
    hashed = []
    real = tokens.hashlib.file_digest
    monkeypatch.setattr(tokens.hashlib, "file_digest", lambda f, name: hashed.append(1) or real(f, name))

    def hashes() -> int:
        before = len(hashed)
        open_tokens(data)
        return len(hashed) - before

    file = Path(data.path[0])
    assert [hashes(), hashes()] == [1, 1]  # too new
    monkeypatch.setattr(tokens, "SETTLED_NS", 0)
    time.sleep(0.02)
    assert [hashes(), hashes(), hashes()] == [1, 0, 0]
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    time.sleep(0.02)
    file.write_text(TEXT.replace("cat", "dog"), encoding="utf-8")
    os.utime(file, ns=times)
    assert hashes() == 1 and "dog" in texts_of(only(data))[0]
    cached(data, ".hash.json").write_text("{")
    assert [hashes(), hashes()] == [1, 0]


def test_a_file_is_read_by_its_name(data: DataConfig) -> None:
    """The same contents in the same order, under names of other kinds, are another text."""
    at = Path(data.path[0]).parent / "folder"
    at.mkdir()
    found = []
    for kinds in (("txt", "jsonl"), ("jsonl", "txt")):
        for name, kind in zip("ab", kinds, strict=True):
            (at / f"{name}.{kind}").write_text('{"text": "x"}')
        found.append(texts_of(only(replace(data, path=(str(at),)))))
        for file in at.iterdir():
            file.unlink()
    assert found == [['{"text": "x"}', "x"], ["x", '{"text": "x"}']]


def test_where_documents_end_belongs_to_the_text(data: DataConfig) -> None:
    at = Path(data.path[0]).parent / "folder"
    at.mkdir()
    for texts, ids in ((["ab", "c"], [97, 98, 245, 99, 245]), (["a", "bc"], [97, 245, 98, 99, 245])):
        for i, text in enumerate(texts):
            (at / f"{i}").write_text(text)
        assert only(replace(data, path=(str(at),))).ids.tolist() == ids


def test_several_sources(tmp_path: Path) -> None:
    """Each has its own cache; one tokenizer is trained on all; entropy is that of the mixture."""
    for name, text in (("a.txt", "aaab" * 50), ("b.txt", "cd" * 10)):
        (tmp_path / name).write_text(text)
    paths = (str(tmp_path / "a.txt"), str(tmp_path / "b.txt"))
    data = DataConfig(path=paths, cache=str(tmp_path / "cache"), bpe_vocab=300)
    both = open_tokens(data)
    assert [len(s.ids) for s in both.sources] == [201, 21] and both.tokens == 222 and both.text_bytes == 220

    def entropy(counts: dict[str, float]) -> float:
        return -sum(c / sum(counts.values()) * math.log(c / sum(counts.values())) for c in counts.values())

    assert both.unigram_entropy == pytest.approx(entropy({"a": 150, "b": 50, "c": 10, "d": 10, "end": 2}))
    a, b = 3 / 201, 1 / 21
    weighted = {"a": 150 * a, "b": 50 * a, "c": 10 * b, "d": 10 * b, "end": a + b}
    assert open_tokens(replace(data, weights=(3.0, 1.0))).unigram_entropy == pytest.approx(entropy(weighted))
    bpe = replace(data, tokenizer="bpe")
    assert open_tokenizer(bpe).identity == Library.train(["aaab" * 50, "cd" * 10], 300).identity
    assert len(list((tmp_path / "cache").glob("*.tokenizer.json"))) == 1
    mixed = replace(data, path=(*paths, str(sidecar(tmp_path, DOCUMENTS))))
    assert open_tokens(mixed).text_bytes is None and len(open_tokens(mixed).sources) == 3


def test_the_entropy_of_a_single_id_is_zero(data: DataConfig) -> None:
    """Not -0.0, which would be printed, nor less where shares of sources add up to more than one by rounding."""
    path = str(jsonl(Path(data.path[0]).parent, [""] * 60))
    for weights in ((1.0,), (0.1, 0.2, 0.3, 0.1, 0.3, 0.1)):
        entropy = open_tokens(replace(data, path=(path,) * len(weights), weights=weights)).unigram_entropy
        assert math.copysign(1, entropy) == 1 and entropy < 1e-12


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
        (".documents.npy", -8),
        (".documents.npy", 0),
        (".documents.npy", None),
        (".counts.npy", -8),
        (".counts.npy", None),
        (".tokenizer.json", -9),
        (".tokenizer.json", None),
    ],
)
def test_damaged_files_are_rebuilt(data: DataConfig, builds: Path, suffix: str, keep: int | None) -> None:
    data = replace(data, tokenizer="bpe")
    whole = only(data).ids.tolist()
    (path,) = (p for p in Path(data.cache).iterdir() if p.name.partition("-")[2][12:] == suffix)
    if keep is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:keep])
    assert only(data).ids.tolist() == whole
    assert builds.read_text() == ("x" if suffix == ".tokenizer.json" else "xx")  # which is trained again, alike
    assert path.exists()


def test_a_crash_before_the_sidecar_leaves_no_cache(data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(path: Path, content: bytes) -> None:
        if path.suffix == ".json":
            raise KeyboardInterrupt
        write_atomically(path, content)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tokens, "write_atomically", crash)
        open_tokens(data)
    assert cached(data, ".bin").exists() and not list(Path(data.cache).glob("*.json"))
    assert open_tokens(data).text_bytes == len(TEXT.encode())


def test_a_crash_while_writing_leaves_nothing(data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "FLUSH", 1)
    path = jsonl(Path(data.path[0]).parent, ["ab", "c"])
    with path.open("a") as file:
        file.write("\n{")
    with pytest.raises(ValueError, match="line 3 is not JSON"):
        open_tokens(replace(data, path=(str(path),)))
    assert [p.suffix for p in Path(data.cache).iterdir()] == [".lock"]


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_four_processes_build_once(data: DataConfig, builds: Path, kind: str) -> None:
    data = replace(data, tokenizer=kind)
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
        open_tokens(replace(data, path=(*data.path, data.path[0] + ".gone.txt")))


def test_nothing_is_shown_without_a_terminal(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tokens, "SILENT_S", 0)
    open_tokens(data)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("write", [rows, jsonl, megatron])
def test_opening_moves_no_random_generator(tmp_path: Path, write: Write) -> None:
    before = np.random.get_state()[1].tobytes()  # type: ignore[index]
    open_tokens(DataConfig(path=(str(write(tmp_path, DOCUMENTS)),), cache=str(tmp_path / "cache")))
    assert np.random.get_state()[1].tobytes() == before  # type: ignore[index]


def test_the_standard_library(tmp_path: Path) -> None:
    begun = time.monotonic()
    data = DataConfig(cache=str(tmp_path))
    assert not list(problems(replace(RunConfig(), data=data)))
    found = only(data)
    texts: Sequence[str] = list(documents(find("stdlib"), "text"))
    assert time.monotonic() - begun < 10
    assert len(texts) > 300 and found.text_bytes is not None and found.text_bytes > 5e6
    assert len(found.ids) == found.text_bytes + len(texts) and len(found.offsets) == len(texts) + 1
    assert (found.ids[found.offsets[1:] - 1] == Bytes.end).all() and found.counts[Bytes.end] == len(texts)
    assert 2.5 < open_tokens(data).unigram_entropy < 4
