"""What counts as a document, and what is refused by name."""

import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from research.config import RunConfig, replace
from research.data.corpus import documents, problems


def test_a_text_file_is_one_document_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("one\r\n\r\n\ntwo \u00e9\U0001f600\x00".encode())
    assert list(documents(str(file))) == ["one\r\n\r\n\ntwo \u00e9\U0001f600\x00"]


def test_stdlib_leaves_out_tests_and_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["a.py", "a/b.py", "a/test.py", "a_b.py", "z.py"]  # in the order of "/" paths, not of folders
    other = ["test/t.py", "a/tests/t.py", "idlelib/idle_test/t.py", "lib2to3/t.py", "site-packages/t.py"]
    for name in [*other, "dist-packages/t.py", "a/__pycache__/t.py", "note.txt", *reversed(wanted)]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "latin1.py").write_bytes(b"# \xe9")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert list(documents("stdlib")) == wanted


def test_a_python_without_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match=r"data\.path=stdlib has no source files"):
        list(documents("stdlib"))
    assert [p.key for p in problems(RunConfig())] == ["data.path"]


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda p: None, "does not exist"),
        (lambda p: p.touch(), "is empty"),
        (lambda p: p.mkdir(), "is a folder"),
        (lambda p: p.write_bytes(b"abc\xff"), "is not UTF-8: byte 3"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, make: Callable[[Path], None], rule: str) -> None:
    file = tmp_path / "corpus.txt"
    make(file)
    with pytest.raises(ValueError, match=rule) as error:
        list(documents(str(file)))
    assert f"data.path={file} {rule}" in str(error.value)
    found = list(problems(replace(RunConfig(), {"data.path": str(file)})))
    assert [(p.key, p.value) for p in found] == [("data.path", str(file))]
    assert rule in str(found[0]) and "stdlib, or a UTF-8 text file" in str(found[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.vocab": 246}, None),
        ({"model.vocab": 245}, "model.vocab=245 must hold the 246 ids of data.tokenizer=bytes; legal: at least 246"),
        ({"model.vocab": 300, "data.tokenizer": "bpe", "data.bpe_vocab": 300}, None),
        (
            {"model.vocab": 300, "data.tokenizer": "bpe", "data.bpe_vocab": 301},
            "model.vocab=300 must hold the ids of data.bpe_vocab=301; "
            "legal: at least 301, or a smaller data.bpe_vocab from 257",
        ),
    ],
)
def test_the_model_must_hold_every_id(changes: dict[str, int | str], message: str | None) -> None:
    found = [str(p) for p in problems(replace(RunConfig(), changes))]
    assert found == ([message] if message else [])


def test_the_cache_must_be_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "cache"
    file.touch()
    (found,) = problems(replace(RunConfig(), {"data.cache": str(file)}))
    assert f"data.cache={file} is not a folder" in str(found)
