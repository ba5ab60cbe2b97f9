"""A YAML file that is missing, malformed or of the wrong form is told by name, with all other problems."""

from pathlib import Path

import pytest

from experiments.command import CHECKS
from research import settings
from research.config import DpConfig, RunConfig
from research.problems import ConfigError

ROOT = Path(__file__).parents[2]


def told(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        settings.load(path)
    (problem,) = caught.value.problems
    return str(problem)


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("experiments/configs/tny.yaml", "experiments/configs/tiny.yaml"),
        ("/nowhere/tiny.yaml", "experiments/configs/tiny.yaml"),
        ("tiny.yaml", "experiments/configs/tiny.yaml"),
    ],
)
def test_a_missing_file_is_told_with_the_nearest(path: str, near: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert told(path).startswith(f"{path} does not exist; legal: {near}")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    assert told(str(tmp_path)).startswith(f"{tmp_path} cannot be read: ")


@pytest.mark.parametrize("text", ["- a\n- b\n", "[]", "[{model: {dim: 8}}]", "5", "text", "null", "true"])
def test_a_file_without_sections(refused, text: str) -> None:
    assert refused(text=text) == ["some.yaml cannot be read: the file holds no `section:` mapping"]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("model: {dim: 8", "line 1"),
        ("model:\n\tdim: 8", "line 2"),
        ("model:\n  dim: 8\n heads: 8", "line 3"),
        ("model: {dim: 8}\n---\nmodel: {dim: 9}", "line 2"),
        ("model: &a {dim: *a}", "line 1"),
        ("model: !x {dim: 8}", "line 1"),
        ("null: 3", "NoneType"),
        (b"\xff\xfe", "can't decode byte 0xff in position 0"),
        (b"model: {dim: 8}\x00", "position 15"),
    ],
)
def test_a_malformed_file_is_told_with_the_place(refused, text: str | bytes, where: str) -> None:
    line, other = refused("model.dmi=3", text=text)
    assert line.startswith("some.yaml cannot be read: ") and where in line and "\n" not in line
    assert other.startswith("model.dmi=3 is not a key")


@pytest.mark.parametrize("text", ["model: {dim: 8, dim: 9}", "model: {dim: 8}\nmodel: {heads: 8}"])
def test_a_key_given_twice(refused, text: str) -> None:
    (line,) = refused(text=text)
    assert "found duplicate key" in line


def test_a_key_given_in_two_forms(refused) -> None:
    """A path is for words: in a file it would be a second way to say the same, which wins over words."""
    (line,) = refused("model.dim=8", text="model: {dim: 72}\nmodel.dim: 80")
    assert line == "'model.dim'=80 is not a key, did you mean model.dim?; legal: model.dim"


@pytest.mark.parametrize("value", ["5", "text", "[1, 2]", "[{dim: 8}]"])
def test_a_scalar_or_a_list_where_a_section_belongs(refused, value: str) -> None:
    for words in ([], ["model.dim=8"]):  # a word hides nothing
        (line,) = refused(*words, text=f"model: {value}")
        assert line.startswith("model=") and " is a section, not a key; legal: model.vocab, model.dim, " in line


@pytest.mark.parametrize("value", ["{}", "{x: 8}", "[8]", "[{x: 8}]"])
def test_a_section_or_a_list_where_a_value_belongs(refused, value: str) -> None:
    (line,) = refused(text=f"model: {{dim: {value}}}")
    assert line.startswith("model.dim")


@pytest.mark.parametrize("text", ["modle:", "modle: {}", "modle: null"])
def test_an_unknown_section_is_unknown_when_empty(refused, text: str) -> None:
    (line,) = refused(text=text)
    assert line.startswith("modle") and "is not a key" in line


@pytest.mark.parametrize(
    "text", ["", "  \n", "# nothing\n", "---\n", "{}", "model:", "model: {}\ntrain: null", "\ufeff"]
)
def test_an_empty_file_or_section_means_the_defaults(tmp_path: Path, text: str) -> None:
    (tmp_path / "some.yaml").write_text(text, encoding="utf-8")
    assert settings.load(tmp_path / "some.yaml") == RunConfig(dp=DpConfig(degree=1))


def test_interpolation_among_what_is_given(tmp_path: Path) -> None:
    (tmp_path / "some.yaml").write_text("model: {vocab: 512}\ndata: {tokenizer: bpe, bpe_vocab: '${model.vocab}'}")
    config = settings.load(tmp_path / "some.yaml", ["record.arm=v${data.bpe_vocab}"])
    assert (config.data.bpe_vocab, config.record.arm) == (512, "v512")
    assert settings.load(tmp_path / "some.yaml", ["model.vocab=600"]).data.bpe_vocab == 600


@pytest.mark.parametrize("value", ["${nope}", "${model.layers}", "${nope:1}", "${.nope}", "${train.steps}"])
def test_an_interpolation_that_fails_hides_nothing(refused, value: str) -> None:
    steps, lr = sorted(refused(text=f"train: {{steps: '{value}', lr: abc}}"), reverse=True)
    assert steps.startswith(f"train.steps={value} cannot be resolved: ") and lr.startswith("train.lr=abc")


def test_an_interpolation_to_the_wrong_type(refused) -> None:
    (line,) = refused(text="model: {dim: '${train.dtype}'}\ntrain: {dtype: float32}")
    assert line == "model.dim=float32 is not an integer; legal: an integer, at least 1"


@pytest.mark.parametrize("path", sorted((ROOT / "experiments" / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_the_configs_of_the_project_load(path: Path) -> None:
    assert settings.load(path, (), CHECKS).train.steps > 1
