"""The documents of a run, and what can be wrong with its `data` section."""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from research.config import ConfigError, Problem, RunConfig
from research.data.tokenizers import Bytes

STDLIB = "stdlib"
NOT_SOURCE = {"site-packages", "dist-packages", "__pycache__", "lib2to3", "test", "tests", "idle_test"}


def documents(path: str) -> Iterator[str]:
    """The documents of `data.path`, always in the same order.

    `stdlib`: every module of Python's standard library without its tests, by relative path; a file that is not
    UTF-8 is left out. Anything else: a UTF-8 text file, which is one document.
    Raises ConfigError (a ValueError) naming a file that is missing, empty, a folder or not UTF-8.
    """
    if path != STDLIB:
        yield _text(path)
        return
    for file in _stdlib_files():
        try:
            yield file.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue


def problems(config: RunConfig) -> Iterator[Problem]:
    """What would stop the data of this config, found before any process starts."""
    data, vocab = config.data, config.model.vocab
    try:
        _stdlib_files() if data.path == STDLIB else _text(data.path)
    except ConfigError as error:
        yield from error.problems
    if Path(data.cache).exists() and not Path(data.cache).is_dir():
        yield Problem("data.cache", data.cache, "is not a folder", "a folder, made where it is missing")
    if data.tokenizer == "bytes" and vocab < Bytes.vocab_size:
        rule = f"must hold the {Bytes.vocab_size} ids of data.tokenizer=bytes"
        yield Problem("model.vocab", vocab, rule, f"at least {Bytes.vocab_size}")
    if data.tokenizer == "bpe" and vocab < data.bpe_vocab:
        rule = f"must hold the ids of data.bpe_vocab={data.bpe_vocab}"
        yield Problem("model.vocab", vocab, rule, f"at least {data.bpe_vocab}, or a smaller data.bpe_vocab from 257")


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in NOT_SOURCE]  # os.walk does not enter what is removed here
        names += [Path(folder, f).relative_to(root).as_posix() for f in files if f.endswith(".py")]
    if not names:
        raise ConfigError([Problem("data.path", STDLIB, f"has no source files in {root}", "a UTF-8 text file")])
    return [root / name for name in sorted(names)]


def _text(path: str) -> str:
    """The text of a file, line ends as they are."""
    try:
        text = Path(path).read_bytes().decode("utf-8")
        rule = "" if text else "is empty"
    except FileNotFoundError:
        rule = "does not exist"
    except IsADirectoryError:
        rule = "is a folder"
    except UnicodeDecodeError as error:
        rule = f"is not UTF-8: byte {error.start} cannot be decoded"
    except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
        rule = f"cannot be read: {error}"
    if rule:
        raise ConfigError([Problem("data.path", path, rule, f"{STDLIB}, or a UTF-8 text file that is not empty")])
    return text
