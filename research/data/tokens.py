"""A corpus as streams of ids, tokenised once and mapped from files after that.

For each source the cache folder holds, under a name made of its contents and of the tokenizer,
    NAME.bin            the ids: a flat array of uint16, or uint32 where the vocabulary needs it (not for token files)
    NAME.documents.npy  (2, documents + 1) int64: ids, and UTF-8 bytes of text, before each document
    NAME.counts.npy     (V,) int64: how often each id occurs
    NAME.json           the sidecar: what the ids are; written last, so without it there is no cache
    NAME.lock           held by the process that builds; the others wait for it
and besides TOKENIZER.tokenizer.json, a trained BPE, and NAME.hash.json, the hash of the contents of a source's files.
A changed text or tokenizer has another name: old files are never wrong, and a run that reads them is not disturbed.
"""

import fcntl
import glob
import hashlib
import json
import re
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, TypeVar

import numpy as np
import tokenizers as hf
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from research.config import DataConfig
from research.data.corpus import Source, documents, find, given_tokenizer, refuse
from research.data.token_files import added, read_ids
from research.data.tokenizers import Library, Tokenizer
from research.files import atomically, write_atomically
from research.problems import ConfigError, Problem

FORMAT = 3  # to be raised when the same text and tokenizer shall give other files
SILENT_S = 2.0  # work that ends sooner shows no progress
FLUSH = 1 << 20  # ids that are written at once
SETTLED_NS = 2 * 10**9  # a file may change without a new time for as long as its file system's clock stands still

T = TypeVar("T")


@dataclass(frozen=True)
class Tokens:
    """The ids of one source. A document of text is closed by the tokenizer's `end`."""

    ids: np.ndarray  # (tokens,) mapped read-only
    offsets: np.ndarray  # (documents + 1,) int64, mapped: document d is ids[offsets[d]:offsets[d+1]]
    byte_offsets: np.ndarray | None  # (documents + 1,) int64, mapped: UTF-8 bytes before each; None for token files
    counts: np.ndarray  # (V,) int64: how often each id occurs; V is the largest id + 1
    vocab_size: int  # every id is below it
    path: str  # of the source, for messages

    def require(self, vocab: int) -> None:
        """Raises ConfigError naming the file where a model of `vocab` rows has none for the largest id."""
        if len(self.counts) > vocab:
            rule = f"has no row for id {len(self.counts) - 1} of data.path={self.path}"
            raise ConfigError([Problem("model.vocab", vocab, rule, f"at least {len(self.counts)}")])

    @property
    def text_bytes(self) -> int | None:
        return None if self.byte_offsets is None else int(self.byte_offsets[-1])


@dataclass(frozen=True)
class Corpus:
    """All sources of a run, in the order of data.path."""

    sources: tuple[Tokens, ...]
    weights: tuple[float, ...]  # data.weights; () goes by size
    digest: str  # of all contents, the field that is read and the tokenizer: equal digests are equal ids

    @property
    def tokens(self) -> int:
        return sum(len(s.ids) for s in self.sources)

    @property
    def text_bytes(self) -> int | None:
        """UTF-8 bytes of all documents; None where a token file does not tell."""
        sizes = [s.text_bytes for s in self.sources]
        return None if None in sizes else sum(s or 0 for s in sizes)

    @property
    def unigram_entropy(self) -> float:
        """Of the ids as the weights mix them, nats per token: the loss of a model that knows frequencies only."""
        weights = self.weights or tuple(float(len(s.ids)) for s in self.sources)
        share = np.zeros(max(len(s.counts) for s in self.sources))
        for source, weight in zip(self.sources, weights, strict=True):
            share[: len(source.counts)] += weight / sum(weights) * source.counts / len(source.ids)
        share = share[share > 0]
        return max(0.0, -float((share * np.log(share)).sum()))  # of a single id, rounding gives a little less


def open_tokens(data: DataConfig) -> Corpus:
    """The ids of all sources of `data.path`, from the cache where they are there and whole, else tokenised now.

    Several processes may ask at once: one builds, the others wait. A cache is never older than its text. Documents are
    read one by one; a document is encoded whole, BPE takes about 100 bytes of memory per token of it.
    Raises ConfigError (a ValueError) naming a file that cannot be used.
    """
    sources = [find(path) for path in data.path]
    hashes = [_content_hash(source, Path(data.cache)) for source in sources]
    tokenizer = None if all(s.tokenised for s in sources) else _tokenizer(data, sources, hashes)
    opened = tuple(_open(s, h, data, tokenizer) for s, h in zip(sources, hashes, strict=True))
    return Corpus(opened, data.weights, _digest(data, sources, hashes, tokenizer))


def _digest(data: DataConfig, sources: Sequence[Source], hashes: Sequence[str], tokenizer: Tokenizer | None) -> str:
    fields = {field for s in sources if (field := _field(s, data))}  # of text alone there is none
    what = [*hashes, tokenizer.identity if tokenizer else "", *fields]
    return hashlib.sha256("\n".join(what).encode()).hexdigest()[:16]


def open_tokenizer(data: DataConfig, digest: str = "") -> Tokenizer:
    """The tokenizer of `open_tokens(data)`. Raises ConfigError naming a file that cannot be used, or where a BPE would
    not be the one of the corpus with this `digest`."""
    sources = [find(path) for path in data.path]
    hashes = [_content_hash(source, Path(data.cache)) for source in sources]
    tokenizer = _tokenizer(data, sources, hashes)
    if digest and _digest(data, sources, hashes, tokenizer) != digest:
        rule = "is not the text any more that the tokenizer was trained on"
        raise ConfigError([Problem("data.path", data.path, rule, "the same text, or data.tokenizer=tokenizer.json")])
    return tokenizer


def _tokenizer(data: DataConfig, sources: Sequence[Source], hashes: Sequence[str]) -> Tokenizer:
    if data.tokenizer != "bpe":
        return given_tokenizer(data)
    fields = [_field(s, data) for s in sources]
    stem = _stem(data, "bpe", [FORMAT, hashes, fields, data.bpe_vocab, hf.__version__])

    def load() -> Library | None:
        try:
            return Library.load(_file(stem, ".tokenizer.json"))
        except ValueError:
            return None

    def build() -> None:
        with _progress(f"training the tokenizer on {', '.join(data.path)}") as advance:
            texts = chain.from_iterable(documents(s, data.text_field) for s in sources)
            bpe = Library.train(advance(texts), data.bpe_vocab)
            write_atomically(_file(stem, ".tokenizer.json"), bpe.to_json().encode())

    return _cached(stem, load, build)


def _open(source: Source, content: str, data: DataConfig, tokenizer: Tokenizer | None) -> Tokens:
    field = _field(source, data)
    how = "ids" if source.tokenised or tokenizer is None else tokenizer.identity
    stem = _stem(data, Path(source.path).stem, [FORMAT, content, field, how])

    def build() -> None:
        if source.tokenised or tokenizer is None:
            _index(stem, source)
        else:
            _tokenise(stem, source, field, tokenizer)

    return _cached(stem, lambda: _load(stem, source), build)


def _field(source: Source, data: DataConfig) -> str:
    return data.text_field if source.has_fields else ""


def _stem(data: DataConfig, name: str, identity: Sequence[object]) -> Path:
    """The name of a cache entry: all that decides its contents is in it."""
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]
    return Path(data.cache) / f"{re.sub('[^A-Za-z0-9_.-]', '_', name)[:60]}-{digest}"


def _cached(stem: Path, load: Callable[[], T | None], build: Callable[[], object]) -> T:
    """What `load` finds; where that is None, one process builds and the others wait."""
    found = load()
    if found is None:
        stem.parent.mkdir(parents=True, exist_ok=True)
        with _file(stem, ".lock").open("w") as lock:  # closing it, or dying, lets go of the lock
            fcntl.flock(lock, fcntl.LOCK_EX)
            if load() is None:  # nobody built it while this process waited
                for left in stem.parent.glob(f".{glob.escape(stem.name)}.*"):  # by one that was killed
                    left.unlink(missing_ok=True)
                build()
        found = load()
    assert found is not None
    return found


def _content_hash(source: Source, cache: Path) -> str:
    """Hash of the contents of a source's files, not of their times: a checkout or a copy changes times and keeps the
    text. Files are read again only where name, size, a time or the inode of one has changed since they were hashed."""
    stats = [(f, f.stat()) for f in source.files]
    seen = [[str(f), s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for f, s in stats]
    where = hashlib.sha256(str(Path(source.path).absolute()).encode()).hexdigest()[:12]
    memo = cache / f"{re.sub('[^A-Za-z0-9_.-]', '_', Path(source.path).stem)[:60]}-{where}.hash.json"
    try:
        known = json.loads(memo.read_text(encoding="utf-8"))
        if known["files"] == seen:
            return str(known["hash"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    now, total = time.time_ns(), hashlib.sha256()
    for path, _ in stats:
        total.update(f"{path.suffix}\n".encode())  # it decides how a file is read
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    if all(now - s.st_ctime_ns > SETTLED_NS for _, s in stats):
        write_atomically(memo, json.dumps({"files": seen, "hash": total.hexdigest()}).encode())
    return total.hexdigest()


def _load(stem: Path, source: Source) -> Tokens | None:
    """The cached tokens; None where a file is missing, cut short or unreadable."""
    try:
        facts = json.loads(_file(stem, ".json").read_text(encoding="utf-8"))
        before = np.load(_file(stem, ".documents.npy"), mmap_mode="r")
        ids = source.files[0] if source.tokenised else _file(stem, ".bin")
        return Tokens(
            # A file that is cut short is a ValueError: it does not hold the count.
            ids=np.memmap(ids, facts["dtype"], mode="r", shape=(facts["count"],)),
            offsets=before[0],
            byte_offsets=None if source.tokenised else before[1],
            counts=np.load(_file(stem, ".counts.npy")),
            vocab_size=facts["vocab_size"],
            path=source.path,
        )
    except (OSError, ValueError, KeyError, EOFError):
        return None


def _tokenise(stem: Path, source: Source, field: str, tokenizer: Tokenizer) -> None:
    """Write the ids of a source of text, a piece at a time; of each document 16 bytes stay in memory."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    before, bytes_before = array("q", [0]), array("q", [0])
    counts, pieces, waiting = np.zeros(0, np.int64), [], 0
    with _progress(f"tokenising {source.path}") as advance, atomically(_file(stem, ".bin")) as file:
        for text in advance(documents(source, field)):
            try:
                ids = tokenizer.encode(text)
            except Exception as error:  # a tokenizer.json may not know every text; the library raises no narrower one
                refuse(source.path, f"cannot be encoded: {error}", "another data.tokenizer")
            pieces += [ids, np.array([tokenizer.end], np.uint32)]
            before.append(before[-1] + len(pieces[-2]) + 1)
            bytes_before.append(bytes_before[-1] + len(text.encode("utf-8")))
            waiting += len(pieces[-2]) + 1
            if waiting >= FLUSH:
                counts, pieces, waiting = added(counts, _write(file, pieces, dtype)), [], 0
        if pieces:
            counts = added(counts, _write(file, pieces, dtype))
        if len(before) == 1:
            refuse(source.path, "holds no documents")
    facts = {"dtype": dtype.name, "vocab_size": tokenizer.vocab_size, "end": tokenizer.end}  # so it is a source, too
    _finish(stem, np.array([before, bytes_before]), counts, facts)


def _write(file: IO[bytes], pieces: Sequence[np.ndarray], dtype: np.dtype) -> np.ndarray:
    ids = np.concatenate(pieces)
    file.write(ids.astype(dtype).data)
    return ids


def _index(stem: Path, source: Source) -> None:
    """Write what is to be known of a file of ids; the ids themselves are used where they are."""
    with _progress(f"reading {source.path}"):
        found = read_ids(source)
    before = np.array([found.offsets, np.zeros_like(found.offsets)])
    _finish(stem, before, found.counts, {"dtype": found.ids.dtype.name, "vocab_size": found.vocab_size})


def _finish(stem: Path, before: np.ndarray, counts: np.ndarray, facts: Mapping[str, object]) -> None:
    """The sidecar comes last: whoever sees it sees whole files."""
    for suffix, values in ((".documents.npy", before), (".counts.npy", counts)):
        with atomically(_file(stem, suffix)) as file:
            np.save(file, values)
    content = json.dumps({**facts, "count": int(before[0, -1])}, indent=1)
    write_atomically(_file(stem, ".json"), content.encode())


@contextmanager
def _progress(what: str) -> Iterator[Callable[[Iterator[T]], Iterator[T]]]:
    """Yields what to pass the pieces through; shown on a terminal once the work has taken SILENT_S."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    progress = Progress(*columns, TextColumn("{task.completed:,.0f} documents"), console=Console(stderr=True))
    progress.live.transient = True
    task = progress.add_task(what, total=None)
    timer = threading.Timer(SILENT_S, progress.start)  # not in the loop: training alone may take long
    if progress.console.is_terminal:
        timer.start()

    def advance(pieces: Iterator[T]) -> Iterator[T]:
        for piece in pieces:
            yield piece
            progress.advance(task)

    try:
        yield advance
    finally:
        timer.cancel()
        if timer.is_alive():
            timer.join()
        if progress.live.is_started:
            progress.stop()


def _file(stem: Path, suffix: str) -> Path:
    return stem.with_name(stem.name + suffix)  # with_suffix would cut a dot in the name
