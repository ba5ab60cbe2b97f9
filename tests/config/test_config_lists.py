"""Keys that hold a list: from YAML, words and rows, each wrong element named, there and back."""

import json

import pytest

from research import record
from research.config import RunConfig, replace
from research.problems import ConfigError
from research.settings import from_mapping, help_text, load, to_mapping, to_words, word


def made(*words: str) -> RunConfig:
    return load(None, words)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("a.txt", ("a.txt",)),
        ("[a.txt]", ("a.txt",)),
        ("[a.txt,b/c.jsonl]", ("a.txt", "b/c.jsonl")),
        ("[a b.txt, 'c,d', \"[e]\"]", ("a b.txt", "c,d", "[e]")),
        ("*.txt", ("*.txt",)),
        ("[data/*.txt, '**/x']", ("data/*.txt", "**/x")),
    ],
)
def test_words_and_yaml_agree(tmp_path, value, path):
    quoted = f"'{value}'" if value == "*.txt" else value  # YAML alone would read an alias
    (tmp_path / "c.yaml").write_text(f"data:\n  path: {quoted}\n")
    assert load(tmp_path / "c.yaml").data.path == path
    assert made(f"data.path={quoted}").data.path == path


def test_numbers_become_floats():
    config = made("data.path=[a,b]", "data.weights=[1,2.5]")
    assert config.data.weights == (1.0, 2.5) and type(config.data.weights[0]) is float
    assert made("data.weights=3").data.weights == (3.0,) and made("data.weights=[]").data.weights == ()


def test_a_later_layer_replaces_the_whole_list(tmp_path):
    (tmp_path / "c.yaml").write_text("data: {path: [a, b], weights: [1, 2]}\n")
    config = load(tmp_path / "c.yaml", ["data.path=[c]", "data.weights=[]"])
    assert (config.data.path, config.data.weights) == (("c",), ())


def test_interpolations_in_a_list(tmp_path):
    (tmp_path / "c.yaml").write_text("data: {path: ['${data.cache}/a', b], weights: ['${train.lr}', 2], cache: here}\n")
    config = load(tmp_path / "c.yaml", ["train.lr=0.5"])
    assert config.data.path == ("here/a", "b") and config.data.weights == (0.5, 2.0)
    with pytest.raises(ConfigError, match=r"data\.path=.* cannot be resolved"):
        made("data.path=['${data.nothing}']")


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (["data.path=[a,7]"], ["data.path[1]=7 is not text"]),
        (
            ["data.path=[a,null,[b],true]"],
            [f"data.path[{i}]={v} is not text" for i, v in enumerate(("null", "['b']", "true"), 1)],
        ),
        (["data.path={a: b}"], ["data.path.a=b is not a key, did you mean data.path?"]),
        (["data.path=7"], ["data.path=7 is not text; legal: one or a list; each text"]),
        (["data.path=[a, 2024-01-01]"], None),
        (["data.path=[]"], ["data.path=[] names no source; legal: at least one"]),
        (["data.path=[a,b]", "data.weights=[1,x]"], ["data.weights[1]=x is not a number; legal: a number, at least 0"]),
        (["data.path=[a,b]", "data.weights=[1,-1]"], ["data.weights[1]=-1 is out of range; legal: a number, at least"]),
        (
            ["data.path=[a,b]", "data.weights=[12:30,010]"],
            ["data.weights[0]=12:30 would be read as 750", "data.weights[1]=010 would be read as 8"],
        ),
        (["data.path=[a,b]", "data.weights=[1,.inf]"], ["data.weights[1]=.inf must be finite"]),
        (["data.path=[a,b]", "data.weights=[1,0]"], ["data.weights[1]=0 leaves its source out"]),
        (["data.path=[a,b]", "data.weights=[1]"], ["data.weights=[1] must hold one weight for each of the 2 sources"]),
        (["data.path=[a,b]", "data.weights=true"], ["data.weights=true is not a number"]),
        (["train.lr=[x]"], ["train.lr=[x] is not a number"]),
        (["data.path=[a"], ["data.path=[a cannot be read"]),
    ],
)
def test_wrong_elements_are_named_with_their_place(tmp_path, words, messages):
    if messages is None:  # a date by YAML 1.1, text to OmegaConf and to people
        assert made(*words).data.path == ("a", "2024-01-01")
        return
    with pytest.raises(ConfigError) as error:
        made(*words)
    found = [str(p) for p in error.value.problems]
    assert len(found) == len(messages) and all(f.startswith(m) for f, m in zip(found, messages, strict=True)), found


def test_wrong_elements_in_a_file(tmp_path):
    (tmp_path / "c.yaml").write_text("data: {path: [a, 7], weights: [1, 012]}\n")
    with pytest.raises(ConfigError) as error:
        load(tmp_path / "c.yaml")
    assert [p.key for p in error.value.problems] == ["data.path[1]", "data.weights[1]"]


PATHS = [
    ("a",),
    ("a", "b"),
    ("a,b", "c]"),
    ("1", "true", "null", ""),
    ("x: y", "#z", "'q'", '"'),
    ("${not}", "a\\b"),
    ("[a]",),
    ("*",),
]


@pytest.mark.parametrize("path", PATHS)
def test_round_trips(path):
    weights = () if len(path) == 1 else tuple(0.1 * (i + 1) for i in range(len(path)))
    config = replace(RunConfig(), {"data.path": path, "data.weights": weights, "dp.degree": 1})
    assert made(*to_words(config)) == config
    assert from_mapping(json.loads(json.dumps(to_mapping(config)))) == config
    assert made(word("data.path", list(path))).data.path == path


def test_the_rows_config_is_what_json_gives_back():
    config = made("data.path=[a,b]", "data.weights=[1,2]")
    tree = to_mapping(config)
    assert tree["data"]["path"] == ["a", "b"] and tree == json.loads(json.dumps(tree))
    assert record.config_hash(tree) == record.config_hash(json.loads(json.dumps(tree)))
    assert record.run_id(config) != record.run_id(made("data.path=[b,a]", "data.weights=[1,2]"))


def test_help_tells_lists():
    text = help_text()
    assert "data.path=stdlib " in text and "one or a list; each text" in text
    assert "data.weights=[]" in text and "one or a list; each a number, at least 0" in text
