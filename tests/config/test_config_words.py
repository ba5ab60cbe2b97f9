"""Words that are no settings, and keys that do not exist: all told together, before anything starts."""

import sys

import pytest

from experiments import command, run
from research import config as configs
from research import settings

KEYS = [f"{section}.{leaf}" for section, keys in settings.to_mapping(configs.RunConfig()).items() for leaf in keys]
SECTIONS = ", ".join(sorted({key.partition(".")[0] + ".*" for key in KEYS}))
SETTING = "is not a setting; legal: section.key=value, without + or ~"


@pytest.mark.parametrize(
    "word",
    ["+x=1", "+model.dim=1", "++model.dim=1", "~model.dim", "model.dim", "", "=", "=3", ".dim=3", "model..dim=3",
     "model.=3", " model.dim=3", "model.dim =3", "Model.dim=3", "--model.dim=3", "model/dim=3", "model.dim:3"],
)  # fmt: skip
def test_a_word_that_is_no_setting(refused, word: str) -> None:
    assert refused(word) == [f"{word} {SETTING}"]


@pytest.mark.parametrize("value", ["{", "[", "*a", "@x", "!x y", "${model.layers", "a\nb: c", "\x00"])
def test_a_value_that_cannot_be_read(refused, value: str) -> None:
    (line,) = refused(f"record.arm={value}")
    assert line.startswith(f"record.arm={value} cannot be read: ")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("model.dmi", "is not a key, did you mean model.dim?; legal: model.dim"),
        ("modle.dim", "is not a key, did you mean model.dim?; legal: model.dim"),
        ("dim", "is not a key, did you mean model.dim?; legal: model.dim"),
        ("train.dim", "is not a key, did you mean model.dim?; legal: model.dim"),
        ("model.dim.x", "is not a key, did you mean model.dim?; legal: model.dim"),
        ("dp.dgree", "is not a key, did you mean dp.degree?; legal: dp.degree"),
        ("dp.x", "is not a key; legal: dp.degree, dp.zero, dp.replicas, dp.keep_gathered, dp.grad_dtype"),
        ("x.y", f"is not a key; legal: {SECTIONS}"),
        ("dp", "is a section, not a key; legal: dp.degree, dp.zero, dp.replicas, dp.keep_gathered, dp.grad_dtype"),
    ],
)
def test_an_unknown_key_is_told_with_the_nearest(refused, name: str, told: str) -> None:
    assert refused(f"{name}=3") == [f"{name}=3 {told}"]
    if "." in name:
        section, _, leaf = name.rpartition(".")
        nested = "".join(f"{s}: {{" for s in section.split(".")) + f"{leaf}: 3" + "}" * len(section.split("."))
        assert refused(text=nested) == [f"{name}=3 {told}"]


@pytest.mark.parametrize("key", KEYS)
def test_a_letter_too_few_or_too_many_is_understood(refused, key: str) -> None:
    for typo in (key[:-1], key + "s"):
        if typo not in KEYS and len(key.partition(".")[2]) > 2:
            (line,) = refused(f"{typo}=3")
            assert "did you mean" in line and key in line.partition("; legal: ")[2].split(", ")


@pytest.mark.parametrize("value", ["", "null", "3", "{dim: 8}", "[]"])
def test_a_section_is_no_setting(refused, value: str) -> None:
    """`model=null` would undo the section of a file, `train={steps: 010}` the check of how a number is written."""
    (line,) = refused(f"model={value}")
    assert line.startswith(f"model={value} is a section, not a key; legal: model.vocab, model.dim, ")


def test_everything_is_told_at_once(refused) -> None:
    words = ["model.dmi=3", "+x=1", "train.lr=abc", "model.kv_heads=3", "data.path=/nowhere/x", "record.arm=${nope}"]
    lines = refused(*words, "dp.degree=999", text="modle: {dim: 3}\ntrain: {steps: 1e3, seed: -1}", world=2)
    starts = [
        "+x=1 is not a setting",
        "record.arm=${nope} cannot be resolved: Interpolation key 'nope' not found",
        "modle.dim=3 is not a key",
        "train.steps=1e3 is not an integer",
        "train.seed=-1 is out of range",
        "model.dmi=3 is not a key",
        "train.lr=abc is not a number",
        "model.kv_heads=3 must divide",
        "dp.degree=999 times pp*cp*tp=1 must equal the world of 2 ranks",
        "dp.degree=999 leaves ranks without a sample",
        "data.path=/nowhere/x does not exist",
    ]
    assert sorted(starts) == sorted(s for s, line in zip(sorted(starts), sorted(lines), strict=True) if s in line)


def test_a_bad_degree_hides_nothing_else(refused) -> None:
    for word in ("dp.degree=0", "dp.degree=x", "dpp.degree=2"):
        lines = refused(word, "data.path=/nowhere/x", "model.kv_heads=3", world=2)
        assert {line.partition("=")[0] for line in lines} == {word.partition("=")[0], "model.kv_heads", "data.path"}


def test_words_win_over_the_file_and_later_words_over_earlier_ones(tmp_path) -> None:
    (tmp_path / "some.yaml").write_text("model: {dim: 010, ffn: 10}")
    model = settings.load(tmp_path / "some.yaml", ["model.dim=0x50", "model.dim=96"]).model
    assert (model.dim, model.ffn, model.layers) == (96, 10, 4)  # what is overruled need not be right


def exit_status(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Of `python -m experiments.run WORDS`, where starting ranks would be an error."""

    def launch(*args: object) -> None:
        raise AssertionError("started")

    monkeypatch.setattr(run, "launch", launch)
    monkeypatch.setattr(sys, "argv", ["run", *words])
    return run.main(run.__doc__, run.train)


def test_bad_input_ends_the_command_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status(monkeypatch, "experiments/configs/tiny.yaml", "model.dmi=3", "train.lr=abc") == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("2 problems in the config:\n") and "model.dmi=3" in err and "train.lr" in err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "cannot be read"),
        ("[]", "is no row of a run: it holds no config"),
        ("{}", "is no row of a run: it holds no config"),
        ('{"config": null}', "is no row of a run: it holds no config"),
        ('{"config": {"model": {"dmi": 3}}}', "model.dmi=3 is not a key"),
    ],
)
def test_a_file_that_is_no_row(tmp_path, monkeypatch, capsys, text: str, told: str) -> None:
    (tmp_path / "some.json").write_text(text)
    assert exit_status(monkeypatch, str(tmp_path / "some.json")) == 2
    assert told in capsys.readouterr().err


def test_rank_0_tells_first(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The others wait, and are ended meanwhile; one that alone has a problem gets to tell it."""
    waited: list[float] = []
    monkeypatch.setattr(command.time, "sleep", waited.append)
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
    for name, value in zip(names, ("2", "2", "localhost", "1", "0"), strict=True):
        monkeypatch.setenv(name, value)
    told = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert exit_status(monkeypatch, "dp.degree=3") == 2
        told.append(capsys.readouterr().err)
    assert told[0].startswith("1 problem in the config:") and told[1] == f"rank 1:\n{told[0]}"
    assert waited == [command.RANK_0_SPEAKS_S]


def test_an_incomplete_launcher_ends_the_command(monkeypatch, capsys) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert exit_status(monkeypatch) == 2
    assert capsys.readouterr().err.startswith("a launcher set RANK, but not WORLD_SIZE")


def test_help_is_no_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(monkeypatch, "experiments/configs/tiny.yaml", "--help") == 0
    assert settings.help_text() in capsys.readouterr().out
