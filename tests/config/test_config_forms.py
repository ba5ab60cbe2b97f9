"""A config keeps its meaning as mapping, words and help; it cannot change; and no input brings it down."""

import dataclasses
import json
import random
import string
from pathlib import Path

import pytest

from experiments.command import CHECKS
from research import config as configs
from research import settings
from research.config import RunConfig
from research.problems import ConfigError

TINY = Path(__file__).parents[2] / "experiments" / "configs" / "tiny.yaml"
KEYS = [f"{section}.{leaf}" for section, keys in settings.to_mapping(RunConfig()).items() for leaf in keys]
SOME = ["train.lr=1e-4", "train.clip=3", "model.tied=true", "record.arm=a b", "dp.degree=3", "train.adam_eps=1e-15"]
ODD_TEXTS = [
    *("", "1", "1e3", "true", "no", "null", "~", "a: b", "a #b", "a=b", "@x", "*a", "- a", "'", '"', "\\", "a\nb"),
    *("${x}", "\\${x}", "$", "???", " a ", "é", "\x7f", "\u2028", "😀", "12:30", "{a: 1}", "[", "%", "2001-01-01"),
]
ODD = [*ODD_TEXTS, "1e-4", ".nan", "-.inf", "010", "0x1f", "1_0", "9" * 40, "-0", "{steps: 1}", "[1]", "${train}"]
VALID = [line.split()[0] for line in settings.help_text().splitlines() if line[:2] == "  "]


@pytest.mark.parametrize(
    "words", [[], SOME, ["train.lr=0.1234567890123456789", "train.clip=1e22", "model.dim=10000000"]]
)
def test_mapping_and_words_give_the_config_back(words: list[str]) -> None:
    config = settings.load(TINY, words)
    stored = json.loads(json.dumps(settings.to_mapping(config)))  # as a row holds it
    assert settings.from_mapping(stored) == config
    assert settings.load(None, settings.to_words(config)) == config
    assert settings.from_mapping(stored, ["train.steps=7"]) == configs.replace(config, {"train.steps": 7})


def test_words_name_only_what_differs_from_the_defaults() -> None:
    assert settings.to_words(RunConfig()) == []
    assert settings.to_words(settings.load(None, ["train.lr=1e-4"])) == ["dp.degree=1", "train.lr=0.0001"]


def test_a_mapping_is_held_to_the_same_rules() -> None:
    tree = {"model": {"dmi": 3, "dim": 64.0, "tied": 1}, "train": {"lr": "1e-4", "steps": True}, "x": {}}
    with pytest.raises(ConfigError) as caught:
        settings.from_mapping(tree)
    assert [str(p).partition(";")[0] for p in caught.value.problems] == [
        "model.dmi=3 is not a key, did you mean model.dim?",
        "model.dim=64.0 is not an integer",
        "model.tied=1 is not a truth value",
        'train.lr="1e-4" is not a number',
        "train.steps=true is not an integer",
        "x={} is not a key",
    ]


PATHS = ["pp.schedule", "data.path", "data.tokenizer", "data.cache", "record.folder"]
PATHS += ["checkpoint.folder", "checkpoint.resume", "checkpoint.weights"]


@pytest.mark.parametrize("key", PATHS)
def test_a_path_may_begin_at_home(key: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From words and from a file; where nobody has that name, it is a name like others, as in a shell."""
    monkeypatch.setenv("HOME", "/home/me")
    section, leaf = key.split(".")
    for text, want in (("~/a~/b", "/home/me/a~/b"), ("file:~/x", "file:/home/me/x"), ("~nobody0/x", "~nobody0/x")):
        (tmp_path / "some.yaml").write_text(f"{section}: {{{leaf}: '{text}'}}")
        for config in (settings.load(None, [f"{key}={text}"]), settings.load(tmp_path / "some.yaml")):
            assert settings.to_mapping(config)[section][leaf] == ([want] if key == "data.path" else want)


def test_a_list_of_paths_and_text_that_is_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = settings.load(None, ["data.path=['~/a',b,'~']", "data.text_field='~/a'"])
    assert config.data.path == ("/home/me/a", "b", "/home/me") and config.data.text_field == "~/a"


def texts() -> list[str]:
    rng = random.Random(0)
    alphabet = "ab1 .:#=-${}[]'\"\\!&*?|>%@`,~\n\té😀"
    return ODD_TEXTS + ["".join(rng.choices(alphabet, k=rng.randint(1, 8))) for _ in range(400)]


def test_any_text_survives_as_a_word() -> None:
    lost = [text for text in texts() if settings.load(None, [settings.word("record.arm", text)]).record.arm != text]
    assert lost == []


def test_every_key_stands_in_the_help_with_default_meaning_and_legal_values() -> None:
    lines = {line.split()[0].partition("=")[0]: line for line in settings.help_text().splitlines() if line[:2] == "  "}
    assert list(lines) == KEYS
    for section in dataclasses.fields(RunConfig):
        assert f"\n{section.name}: " in "\n" + settings.help_text()
        kind = type(getattr(RunConfig(), section.name))
        for field in dataclasses.fields(kind):
            line = lines[f"{section.name}.{field.name}"]
            assert f" {field.metadata['meaning']} (" in line
    assert "(float32, bfloat16, float64)" in lines["train.dtype"]
    assert "(0 to 1)" in lines["train.decay_share"]
    assert "(an integer, at least 1)" in lines["model.dim"]
    assert "(true, false)" in lines["model.tied"] and "(text)" in lines["data.cache"]


def test_the_defaults_in_the_help_are_words_that_can_be_given() -> None:
    lines = [line.split()[0] for line in settings.help_text().splitlines() if line[:2] == "  "]
    assert settings.load(None, lines) == settings.load(None)


def test_a_config_cannot_change() -> None:
    config = RunConfig()
    for part, name in [(config, "model"), *((getattr(config, f.name), None) for f in dataclasses.fields(config))]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, name or dataclasses.fields(part)[0].name, 1)
    assert configs.replace(config, {"train.seed": 3}).train.seed == 3 and config.train.seed == 0


def random_words(rng: random.Random) -> list[str]:
    """Valid words, known keys with odd values, words with a character changed, and noise."""
    words = []
    for _ in range(rng.randint(1, 4)):
        word = rng.choice(VALID)
        kind = rng.random()
        if kind < 0.15:
            word = f"{rng.choice(KEYS)}={rng.choice(ODD)}"
        elif kind < 0.3:
            at = rng.randrange(len(word))
            word = word[:at] + rng.choice(string.printable) + word[at + rng.randint(0, 1) :]
        elif kind < 0.4:
            word = "".join(rng.choices(string.printable, k=rng.randint(0, 12)))
        words.append(word)
    return words


@pytest.mark.timeout(20)
def test_random_words_are_a_config_or_are_told() -> None:
    rng = random.Random(1)
    loaded = 0
    for _ in range(400):
        words, world = random_words(rng), rng.choice([None, 1, 2, 6])
        try:
            config = settings.load(TINY if rng.random() < 0.5 else None, words, CHECKS[::2], world)
        except ConfigError as error:
            assert error.problems and str(error)
        except Exception as error:
            raise AssertionError(words) from error
        else:
            loaded += 1
            assert settings.load(None, settings.to_words(config)) == config
    assert 50 < loaded < 350


@pytest.mark.timeout(20)
def test_random_files_are_a_config_or_are_told(tmp_path: Path) -> None:
    rng = random.Random(2)
    whole = TINY.read_text(encoding="utf-8")
    for _ in range(200):
        text = list(whole)
        for _ in range(rng.randint(1, 6)):
            text[rng.randrange(len(text))] = rng.choice([*string.printable, "", "${", "- ", "null"])
        (tmp_path / "some.yaml").write_text("".join(text), encoding="utf-8")
        try:
            settings.load(tmp_path / "some.yaml", (), CHECKS)
        except ConfigError:
            pass
        except Exception as error:
            raise AssertionError("".join(text)) from error
