"""What counts as a document, and what is refused by name."""

import json
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from research.config import DataConfig, RunConfig, replace
from research.data.corpus import documents, find, problems
from research.data.tokens import open_tokens
from research.problems import ConfigError


def all_of(path: Path | str, field: str = "text") -> list[str]:
    return list(documents(find(str(path)), field))


def test_a_text_file_is_one_document_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("one\r\n\r\n\ntwo \u00e9\U0001f600".encode())
    assert all_of(file) == ["one\r\n\r\n\ntwo \u00e9\U0001f600"]


def test_stdlib_leaves_out_tests_and_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["a.py", "a/b.py", "a/test.py", "a_b.py", "z.py"]  # in the order of "/" paths, not of folders
    other = ["test/t.py", "a/tests/t.py", "idlelib/idle_test/t.py", "lib2to3/t.py", "site-packages/t.py"]
    for name in [*other, "dist-packages/t.py", "a/__pycache__/t.py", "note.txt", *reversed(wanted)]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "latin1.py").write_bytes(b"# \xe9")
    (tmp_path / "none.py").touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert [d for d in all_of("stdlib") if d] == wanted


def test_a_python_without_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match=r"data\.path=stdlib has no source files"):
        all_of("stdlib")
    assert [p.key for p in problems(RunConfig())] == ["data.path"]


def test_a_folder_may_mix_kinds_of_text(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"body": "1"}\n{"body": ""}\n')
    (tmp_path / "a.md").write_text("0")
    (tmp_path / "c").mkdir()
    parquet.write_table(pa.table({"body": ["3", "4"]}), tmp_path / "c" / "c.parquet")
    assert all_of(tmp_path, "body") == ["0", "1", "", "3", "4"]
    assert all_of(tmp_path / "*.*", "body") == ["0", "1", ""]


def test_names_are_read_in_letters_of_either_case(tmp_path: Path) -> None:
    (tmp_path / "A.JSONL").write_text('{"body": "1"}\n')
    parquet.write_table(pa.table({"body": ["2"]}), tmp_path / "B.Parquet")
    assert all_of(tmp_path, "body") == ["1", "2"] and find(str(tmp_path / "A.JSONL")).has_fields
    (tmp_path / "C.BIN").write_bytes(b"\1\2")
    with pytest.raises(ValueError, match=r"C\.BIN holds token ids: it must stand in data\.path by itself"):
        find(str(tmp_path))
    with pytest.raises(ValueError, match=r"C\.bin does not exist, and data\.path=.*C\.BIN needs it"):
        find(str(tmp_path / "C.BIN"))


def test_another_field(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "no", "content": "yes"}\r\n', encoding="utf-8")
    assert all_of(lines, "content") == ["yes"]


def jsonl(*lines: object) -> Callable[[Path], None]:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    return lambda p: [p.write_text("\n".join(texts))][0] and None


def table(columns: dict[str, list[object]], keep: int | None = None) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        parquet.write_table(pa.table(columns), path)
        path.write_bytes(path.read_bytes()[:keep])

    return write


GOOD = {"text": "a"}
REFUSED = [  # file, how it is made, what the message says, whether it shows before the text is read
    ("a.txt", lambda p: None, "does not exist", True),
    ("a.txt", lambda p: p.touch(), "is empty", True),
    ("a.txt", lambda p: p.write_bytes(b"abc\xff"), "is not UTF-8: byte 3 cannot be decoded", True),
    ("a.txt", lambda p: p.write_bytes(b"a" * 70000 + b"\xff"), "is not UTF-8: byte 70000", False),
    ("a.txt", lambda p: p.write_bytes(b"ab\xc3"), "is not UTF-8: byte 2", True),
    ("a.txt", lambda p: p.write_bytes(b"abc\0"), "is binary: byte 3 is NUL", True),
    ("a.jsonl", jsonl(GOOD, "{"), "line 2 is not JSON", False),
    ("a.jsonl", jsonl("{"), "line 1 is not JSON", True),
    ("a.jsonl", jsonl(GOOD, "", GOOD), "line 2 is not JSON", False),
    ("a.jsonl", lambda p: p.write_bytes(b'{"text": "a"}\n{"text": "\xff"}'), "line 2 is not JSON", False),
    ("a.jsonl", jsonl(GOOD, {"b": "a"}), "line 2 has no data.text_field=text; legal: one of its fields: b", False),
    ("a.jsonl", jsonl(GOOD, GOOD, ["a"]), "line 3 is not an object", False),
    ("a.jsonl", jsonl(GOOD, {"text": None}), "line 2: data.text_field=text is not text but NoneType", False),
    ("a.jsonl", jsonl(GOOD, '{"text": "\\ud83d"}'), "line 2: data.text_field=text holds half a surrogate", False),
    ("a.parquet", lambda p: p.touch(), "is empty", True),
    ("a.parquet", lambda p: p.write_bytes(b"PAR1" * 50), "cannot be read as Parquet", True),
    ("a.parquet", table({"text": ["a"] * 100}, -20), "cannot be read as Parquet", True),
    ("a.parquet", table({"a": ["a"], "b": [1]}), "its schema has no data.text_field=text; legal: one of its", True),
    ("a.parquet", table({"text": ["a", None]}), "row 2: data.text_field=text is not text but NoneType", False),
    ("a.parquet", table({"text": [7]}), "row 1: data.text_field=text is not text but int", True),
]


@pytest.mark.parametrize(("name", "make", "rule", "early"), REFUSED)
@pytest.mark.parametrize("inside", [False, True])
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, name: str, make: Callable[[Path], None], rule: str, early: bool, inside: bool
) -> None:
    """By itself, or among the files of a folder."""
    file = tmp_path / "corpus" / name
    file.parent.mkdir()
    make(file)
    if inside and not file.exists():
        return
    data = DataConfig(path=(str(file.parent if inside else file),), cache=str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"1 problem in the config") as error:
        open_tokens(data)
    assert f"data.path={file} {rule}" in str(error.value)
    assert not list(Path(data.cache).glob("*.json")) and not list(Path(data.cache).glob("*.bin"))
    found = [str(p) for p in problems(replace(RunConfig(), {"data.path": data.path}))]
    assert len(found) == (1 if early else 0)
    assert not early or f"data.path={file} {rule}" in found[0]


@pytest.mark.parametrize(
    ("path", "rule"),
    [("none*.txt", "matches no files"), ("folder", "has no files"), ("**/*.x", "matches no files")],
)
def test_a_pattern_or_folder_without_files(tmp_path: Path, path: str, rule: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=rule) as error:
        find(str(tmp_path / path))
    assert f"data.path={tmp_path / path} {rule}" in str(error.value)


@pytest.mark.parametrize("path", ["", "a\0b", "a" * 5000])
def test_a_name_that_is_none(path: str) -> None:
    (found,) = problems(replace(RunConfig(), {"data.path": (path,)}))
    assert found.key == "data.path" and found.value == (path or '""')


def test_the_folder_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("x")
    monkeypatch.chdir(tmp_path)
    assert all_of(".") == ["x"]


def test_a_folder_reads_what_is_behind_links(tmp_path: Path) -> None:
    """Of folders and of files, but not in a circle, nor what is hidden or no file."""
    for name in ("a.txt", "b/c.txt", "elsewhere/d.txt", "elsewhere/.e.txt", "f.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    folder = tmp_path / "folder"
    folder.mkdir()
    links = {"1": "a.txt", "2": "b", "3": "elsewhere", ".4": "f.txt", "5": "folder", "b/up": "folder", "b/here": "b"}
    for name, target in links.items():
        (tmp_path / name if "/" in name else folder / name).symlink_to(tmp_path / target)
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    (folder / "6").symlink_to(tmp_path / "pipe")
    assert (
        all_of(folder)
        == all_of(folder / "*") + all_of(folder / "*" / "*.txt")
        == ["a.txt", "b/c.txt", "elsewhere/d.txt"]
    )


@pytest.mark.parametrize("path", ["folder", "folder/**/*", "folder/in/a.txt", "folder/in/b*"])
def test_a_link_to_nothing_is_named(tmp_path: Path, path: str) -> None:
    folder = tmp_path / "folder" / "in"
    folder.mkdir(parents=True)
    (folder / "0.txt").write_text("0")
    name = folder / ("b.txt" if path.endswith("b*") else "a.txt")
    name.symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError) as error:
        find(str(tmp_path / path))
    (told,) = map(str, error.value.problems)
    assert told.startswith(f"data.path={name} is a link to {tmp_path}/gone, which does not exist")


def test_ids_do_not_hide_among_text(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\1\2")
    for path in (tmp_path, tmp_path / "*.bin"):
        with pytest.raises(ValueError, match=r"a\.bin holds token ids: it must stand in data\.path by itself"):
            find(str(path))


def test_every_source_that_is_wrong_is_named(tmp_path: Path) -> None:
    (tmp_path / "ok.txt").write_text("ok")
    paths = [str(tmp_path / n) for n in ("one.txt", "ok.txt", "two.txt")]
    found = [p.value for p in problems(replace(RunConfig(), {"data.path": tuple(paths)}))]
    assert found == [paths[0], paths[2]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.vocab": 246}, None),
        ({"model.vocab": 245}, "model.vocab=245 must hold the 246 ids of data.tokenizer=bytes; legal: at least 246"),
        ({"model.vocab": 300, "data.tokenizer": "bpe", "data.bpe_vocab": 300}, None),
        (
            {"model.vocab": 300, "data.tokenizer": "bpe", "data.bpe_vocab": 301},
            "model.vocab=300 must hold the 301 ids of data.bpe_vocab=301; "
            "legal: at least 301, or a smaller data.bpe_vocab from 257",
        ),
        (
            {"data.tokenizer": "bites"},
            "data.tokenizer=bites does not exist; legal: bytes, bpe, or the path of a tokenizer.json",
        ),
        ({"train.eval_every": 5}, "data.heldout=0 keeps no text for train.eval_every=5; legal: above 0, such as 0.01"),
        ({"train.eval_every": 5, "data.heldout": 0.1}, None),
    ],
)
def test_rules_that_join_keys(changes: dict[str, int | str], message: str | None) -> None:
    found = [str(p) for p in problems(replace(RunConfig(), changes))]
    assert found == ([message] if message else [])


def test_the_cache_must_be_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "cache"
    file.touch()
    (found,) = problems(replace(RunConfig(), {"data.cache": str(file)}))
    assert f"data.cache={file} is not a folder" in str(found)


def test_a_parquet_file_without_rows_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none.parquet"
    parquet.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    config = replace(RunConfig(), {"data.path": (str(path),), "data.cache": str(tmp_path / "cache")})
    with pytest.raises(ConfigError, match=r"none.parquet holds no documents"):
        open_tokens(config.data)
