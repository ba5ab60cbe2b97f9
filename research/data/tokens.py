"""A corpus as one stream of ids, tokenised once and mapped from a file after that.

The cache folder holds, under a name made of the text and the tokenizer,
    NAME.bin             the ids: a flat array of uint16, or uint32 where the vocabulary needs it
    NAME.json            the sidecar: what the ids are; written last, so without it there is no cache
    NAME.tokenizer.json  the trained tokenizer (BPE only)
    NAME.lock            held by the process that builds; the others wait for it
A changed text or tokenizer has another name: old files are never wrong, and a run that reads them is not disturbed.
"""

import fcntl
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers as hf
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from research.config import DataConfig
from research.data.corpus import documents
from research.data.tokenizers import Bpe, Bytes, Tokenizer
from research.files import write_atomically

FORMAT = 1  # to be raised when the same text and tokenizer shall give other files
SILENT_S = 2.0  # work that ends sooner shows no progress


@dataclass(frozen=True)
class Tokens:
    """The whole corpus: each document followed by `end`."""

    ids: np.ndarray  # (tokens,) uint16 or uint32, mapped read-only
    vocab_size: int  # every id is below it
    end: int
    text_bytes: int  # UTF-8 bytes of all documents
    unigram_entropy: float  # of `ids`, nats per token: the loss of a model that knows frequencies only
    path: str  # data.path, for messages


def open_tokens(data: DataConfig) -> Tokens:
    """The ids of `data.path`, from the cache where they are there and whole, else tokenised now.

    Several processes may ask at once: one builds, the others wait. Every call reads and hashes the text, so a cache
    is never older than its text. A document is encoded whole: BPE takes about 100 bytes of memory per token of it.
    Raises ConfigError (a ValueError) naming a file that cannot be used.
    """
    return _open(data)[0]


def open_tokenizer(data: DataConfig) -> Tokenizer:
    """The tokenizer that made `open_tokens(data)`."""
    return Bytes() if data.tokenizer == "bytes" else Bpe.load(_file(_open(data)[1], ".tokenizer.json"))


def _open(data: DataConfig) -> tuple[Tokens, Path]:
    texts = list(documents(data.path))
    identity = _identity(data, texts)
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]
    stem = Path(data.cache) / f"{Path(data.path).stem}-{data.tokenizer}-{digest}"
    tokens = _load(stem, data.path)
    if tokens is None:
        stem.parent.mkdir(parents=True, exist_ok=True)
        with _file(stem, ".lock").open("w") as lock:  # closing it, or dying, lets go of the lock
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _load(stem, data.path) is None:  # nobody built it while this process waited
                _build(stem, data, texts, identity)
        tokens = _load(stem, data.path)
    assert tokens is not None
    return tokens, stem


def _identity(data: DataConfig, texts: Sequence[str]) -> dict[str, str | int]:
    """All that decides the ids. Contents, not times: a checkout or a copy changes times and keeps the text."""
    source = hashlib.sha256()
    for text in texts:
        content = text.encode("utf-8")
        source.update(len(content).to_bytes(8, "little") + content)
    identity: dict[str, str | int] = {"format": FORMAT, "source": source.hexdigest(), "tokenizer": data.tokenizer}
    return identity | ({"bpe_vocab": data.bpe_vocab, "library": hf.__version__} if data.tokenizer == "bpe" else {})


def _load(stem: Path, path: str) -> Tokens | None:
    """The cached tokens; None where a file is missing, cut short or unreadable."""
    try:
        facts = json.loads(_file(stem, ".json").read_text(encoding="utf-8"))
        if facts["tokenizer"] == "bpe" and not _file(stem, ".tokenizer.json").is_file():
            return None
        return Tokens(
            # A file that is cut short is a ValueError: it does not hold the count.
            ids=np.memmap(_file(stem, ".bin"), facts["dtype"], mode="r", shape=(facts["count"],)),
            vocab_size=facts["vocab_size"],
            end=facts["end"],
            text_bytes=facts["text_bytes"],
            unigram_entropy=facts["unigram_entropy"],
            path=path,
        )
    except (OSError, ValueError, KeyError):
        return None


def _build(stem: Path, data: DataConfig, texts: Sequence[str], identity: dict[str, str | int]) -> None:
    """Tokenise and write. The sidecar comes last: whoever sees it sees whole files."""
    with _progress(f"tokenising {data.path}", len(texts)) as advance:
        tokenizer: Tokenizer = Bytes()
        if data.tokenizer == "bpe":
            tokenizer = bpe = Bpe.train(texts, data.bpe_vocab)
            write_atomically(_file(stem, ".tokenizer.json"), bpe.to_json().encode())
        dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
        pieces = []
        for text in texts:
            pieces += [tokenizer.encode(text).astype(dtype), np.array([tokenizer.end], dtype)]
            advance()
    ids = np.concatenate(pieces)
    counts = np.bincount(ids)
    share = counts[counts > 0] / len(ids)
    facts = identity | {
        "dtype": dtype.name,
        "count": len(ids),
        "vocab_size": tokenizer.vocab_size,
        "end": tokenizer.end,
        "text_bytes": sum(len(text.encode("utf-8")) for text in texts),
        "unigram_entropy": float(-(share * np.log(share)).sum()),
    }
    write_atomically(_file(stem, ".bin"), ids.tobytes())
    write_atomically(_file(stem, ".json"), json.dumps(facts, indent=1).encode())


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Yields what to call after each of `total` pieces; a bar on a terminal once the work has taken SILENT_S."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    task = progress.add_task(what, total=total)
    timer = threading.Timer(SILENT_S, progress.start)  # not in the loop: training alone may take long
    if progress.console.is_terminal:
        timer.start()
    try:
        yield lambda: progress.advance(task)
    finally:
        timer.cancel()
        if timer.is_alive():
            timer.join()
        if progress.live.is_started:
            progress.stop()


def _file(stem: Path, suffix: str) -> Path:
    return stem.with_name(stem.name + suffix)  # with_suffix would cut a dot in the name
