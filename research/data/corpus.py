"""What `data.path` names: sources, their files and documents, and what can be wrong with them."""

import glob
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from research.config import DataConfig, RunConfig
from research.data.tokenizers import Bytes, Library
from research.problems import ConfigError, Problem

STDLIB = "stdlib"
NOT_SOURCE = {"site-packages", "dist-packages", "__pycache__", "lib2to3", "test", "tests", "idle_test"}
JSONL = {".jsonl", ".ndjson", ".json"}
PARQUET = {".parquet"}
IDS = {".bin", ".idx"}
LEGAL = f"{STDLIB}, a UTF-8 text, .jsonl or .parquet file, a folder or glob of them, .bin with .json, .bin with .idx"
PEEK = 1 << 16  # bytes of a text file that are looked at before a run starts


@dataclass(frozen=True)
class Source:
    """One entry of `data.path`: files of text in a fixed order, or one file of token ids and what describes it."""

    path: str  # as it stands in data.path
    kind: Literal["stdlib", "text", "sidecar", "indexed"]
    files: tuple[Path, ...]  # text; or the .bin and its .json or .idx

    @property
    def tokenised(self) -> bool:
        return self.kind in ("sidecar", "indexed")

    @property
    def has_fields(self) -> bool:
        return any(suffix(f) in JSONL | PARQUET for f in self.files) and self.kind == "text"


def suffix(file: Path) -> str:
    """Which says how a file is read, in letters of either case."""
    return file.suffix.lower()


def refuse(path: Path | str, rule: str, legal: str = LEGAL) -> NoReturn:
    """Raises ConfigError (a ValueError) that names the file."""
    raise ConfigError([Problem("data.path", str(path), rule, legal)])


def find(path: str) -> Source:
    """The source that one entry of `data.path` names. A folder is every file below it whose path has no hidden part,
    behind links too; a glob may hold `**`; the order is that of relative paths.

    Raises ConfigError naming what is missing, empty or unreadable.
    """
    if path == STDLIB:
        return Source(path, "stdlib", tuple(_stdlib_files()))
    try:
        source = _named(path)
    except OSError as error:
        refuse(path, f"cannot be read: {error}")
    if not source.files:
        refuse(path, "has no files" if Path(path).is_dir() else "matches no files")
    for file in source.files:
        _require_content(file, source)
    return source


def _named(path: str) -> Source:
    if not path:
        refuse('""', "names no source")
    here = Path(path)
    stem = here.with_suffix("") if suffix(here) in IDS else here
    index, ids, sidecar = (Path(f"{stem}{end}") for end in (".idx", ".bin", ".json"))
    if not here.exists() and glob.has_magic(path):
        found = sorted(glob.glob(path, recursive=True))  # noqa: PTH207  # as in a shell: no hidden files
        return Source(path, "text", tuple(Path(f) for f in found if _is_file_or_dangles(Path(f))))
    if suffix(here) in IDS or (not here.exists() and index.exists()):
        indexed = index.exists() or suffix(here) == ".idx"
        return Source(path, "indexed" if indexed else "sidecar", (ids, index if indexed else sidecar))
    if here.is_dir():
        files = sorted(_below(here), key=lambda f: f.relative_to(here).as_posix())
        return Source(path, "text", tuple(files))
    return Source(path, "text", (here,))


def _below(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """The files below a folder that are not hidden. Links are followed, but for those into one of the folders `above`,
    which would go round for ever."""
    above |= {folder.resolve()}
    for entry in folder.iterdir():
        if entry.name.startswith("."):
            continue
        if _is_file_or_dangles(entry):
            yield entry
        elif entry.is_dir() and entry.resolve() not in above:
            yield from _below(entry, above)


def _is_file_or_dangles(path: Path) -> bool:
    """Also a link to nothing, which is refused by name later: left out, its text would be missed by nobody."""
    return path.is_file() or (path.is_symlink() and not path.exists())


def documents(source: Source, field: str) -> Iterator[str]:
    """The documents of a source of text, always in the same order.

    A text file is one document, read as a whole; a JSONL file has one on each line and a Parquet file one in each row,
    read piece by piece. Of `stdlib`, every module without the tests; a file that is not UTF-8 is left out.
    Raises ConfigError naming the file, and the line or row, that cannot be used.
    """
    for file in source.files:
        if source.kind == "stdlib":
            try:
                yield file.read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                continue
        elif suffix(file) in JSONL:
            yield from _jsonl(file, field)
        elif suffix(file) in PARQUET:
            yield from _parquet(file, field)
        else:
            content = file.read_bytes()
            _require_text(file, content)
            yield content.decode("utf-8")


def problems(config: RunConfig) -> Iterator[Problem]:
    """What would stop the data of this config, as far as it shows before the text is read: names, sizes, and the
    beginning of the first file of each source."""
    data, vocab = config.data, config.model.vocab
    sources = []
    for path in data.path:
        try:
            sources.append(find(path))
            _peek(sources[-1], data.text_field)
        except ConfigError as error:
            yield from error.problems
    if Path(data.cache).exists() and not Path(data.cache).is_dir():
        yield Problem("data.cache", data.cache, "is not a folder", "a folder, made where it is missing")
    if config.train.eval_every and not data.heldout:
        rule = f"keeps no text for train.eval_every={config.train.eval_every}"
        yield Problem("data.heldout", data.heldout, rule, "above 0, such as 0.01")
    tokenised = [s.path for s in sources if s.tokenised]
    if len(tokenised) == len(data.path):
        return  # no text, so the tokenizer does not matter
    if data.tokenizer == "bpe" and tokenised:
        rule = f"cannot be trained beside the ids of data.path={tokenised[0]}, which have their own meaning"
        yield Problem("data.tokenizer", data.tokenizer, rule, "the tokenizer.json that made those ids")
    try:
        needed = data.bpe_vocab if data.tokenizer == "bpe" else given_tokenizer(data).vocab_size
    except ConfigError as error:
        yield from error.problems
        return
    if vocab < needed:
        name = f"data.bpe_vocab={needed}" if data.tokenizer == "bpe" else f"data.tokenizer={data.tokenizer}"
        rule = f"must hold the {needed} ids of {name}"
        smaller = ", or a smaller data.bpe_vocab from 257" if data.tokenizer == "bpe" else ""
        yield Problem("model.vocab", vocab, rule, f"at least {needed}{smaller}")


def given_tokenizer(data: DataConfig) -> Bytes | Library:
    """A tokenizer that need not be trained. Raises ConfigError naming the file that is none."""
    if data.tokenizer == "bytes":
        return Bytes()
    try:
        return Library.load(Path(data.tokenizer))
    except ValueError as error:
        legal = "bytes, bpe, or the path of a tokenizer.json"
        raise ConfigError([Problem("data.tokenizer", data.tokenizer, str(error), legal)]) from error


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in NOT_SOURCE]  # os.walk does not enter what is removed here
        names += [Path(folder, f).relative_to(root).as_posix() for f in files if f.endswith(".py")]
    if not names:
        refuse(STDLIB, f"has no source files in {root}")
    return [root / name for name in sorted(names)]


def _require_content(file: Path, source: Source) -> None:
    try:
        empty = file.stat().st_size == 0
    except FileNotFoundError:
        if file.is_symlink():
            refuse(file, f"is a link to {file.readlink()}, which does not exist")
        beside = source.tokenised and file.name != Path(source.path).name
        refuse(file, f"does not exist, and data.path={source.path} needs it" if beside else "does not exist")
    except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
        refuse(file, f"cannot be read: {error}")
    if empty:
        refuse(file, "is empty")
    if source.kind == "text" and suffix(file) in IDS:
        refuse(file, "holds token ids: it must stand in data.path by itself", "text in folders and globs")


def _peek(source: Source, field: str) -> None:
    first = source.files[0]
    if source.kind != "text":
        return
    if suffix(first) in JSONL | PARQUET:
        next(documents(source, field), None)
        return
    with first.open("rb") as file:
        _require_text(first, file.read(PEEK), whole=first.stat().st_size <= PEEK)


def _require_text(file: Path, content: bytes, whole: bool = True) -> None:
    """Refuses bytes that are not UTF-8, and NUL, which binary files and files cut by a crash hold. Where the content
    is not `whole`, a last character may be cut."""
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        if whole or error.reason != "unexpected end of data":
            refuse(file, f"is not UTF-8: byte {error.start} cannot be decoded")
    if b"\0" in content:
        refuse(file, f"is binary: byte {content.index(0)} is NUL")


def _jsonl(file: Path, field: str) -> Iterator[str]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
            except ValueError as error:  # of JSON or of UTF-8
                refuse(file, f"line {number} is not JSON: {error}", "one JSON object on each line")
            yield _field(file, f"line {number}", record, field)


def _parquet(file: Path, field: str) -> Iterator[str]:
    import pyarrow as pa  # a tenth of a second, so only where it is needed
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file, memory_map=True, pre_buffer=False) as table:
            names = table.schema_arrow.names
            if field not in names:
                _field(file, "its schema", dict.fromkeys(names), field)
            number = 0
            for batch in table.iter_batches(1024, columns=[field], use_threads=False):  # ranks are forked
                for text in batch.column(0).to_pylist():
                    number += 1
                    yield _field(file, f"row {number}", {field: text}, field)
    except (pa.ArrowException, OSError) as error:
        refuse(file, f"cannot be read as Parquet: {' '.join(str(error).split())}")


def _field(file: Path, place: str, record: object, field: str) -> str:
    """The text of a record. Raises ConfigError naming file, place and field."""
    if not isinstance(record, dict):
        refuse(file, f"{place} is not an object", f'{{"{field}": "text of a document"}}')
    if field not in record:
        have = ", ".join(map(str, record)) or "nothing"
        refuse(file, f"{place} has no data.text_field={field}", f"one of its fields: {have}")
    text = record[field]
    if not isinstance(text, str):
        refuse(file, f"{place}: data.text_field={field} is not text but {type(text).__name__}", "a field of text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        refuse(file, f"{place}: data.text_field={field} holds half a surrogate pair, which is no character", "UTF-8")
    return text
