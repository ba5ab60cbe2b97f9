"""Attempts: whole, told once, and refused by name where they are none."""

import json
import multiprocessing
from pathlib import Path

import pytest

from research import attempts, settings
from research.attempts import Failure, Progress
from research.config import RunConfig
from research.problems import ConfigError
from research.sweep.keep import keep


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return settings.load(None, ["record.ablation=axes", "record.arm=one", f"record.folder={tmp_path}"])


def test_an_attempt_comes_back_and_is_a_config(config: RunConfig) -> None:
    folder = attempts.folder_of(config)
    assert attempts.read(folder) is None
    attempts.write(attempts.new(config), folder)
    assert attempts.read(folder) == attempts.new(config) == attempts.load(config.record.folder)[0]
    stored = json.loads((folder / "attempt.json").read_text())["config"]
    assert settings.from_mapping(stored) == config


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"state": "done"}'])
def test_a_file_that_is_no_attempt_is_told(config: RunConfig, text: str) -> None:
    folder = attempts.folder_of(config)
    folder.mkdir(parents=True)
    (folder / "attempt.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        attempts.read(folder)
    assert str(folder / "attempt.json") in str(caught.value)


def test_ranks_tell_only_who_watches(config: RunConfig) -> None:
    folder = attempts.folder_of(config)
    attempts.tell(Progress(1, 2), config)
    attempts.tell_failure(Failure(0, "x"), config)
    assert not folder.exists()
    folder.mkdir(parents=True)
    attempts.tell(Progress(1, 2, 3.0), config)
    assert attempts.progress_of(folder) == Progress(1, 2, 3.0)


def test_the_first_of_eight_errors_counts(config: RunConfig) -> None:
    attempts.folder_of(config).mkdir(parents=True)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=attempts.tell_failure, args=(Failure(r, f"Error: {r}"), config)) for r in range(8)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    first = attempts.failure_of(attempts.folder_of(config))
    assert first is not None and first.line == f"Error: {first.rank}"
    attempts.tell_failure(Failure(99, "Error: late"), config)
    assert attempts.failure_of(attempts.folder_of(config)) == first
    assert sorted(p.name for p in attempts.folder_of(config).iterdir()) == ["error.json"]


def test_what_somebody_tried_meanwhile_is_not_tried_again(config: RunConfig) -> None:
    folder = attempts.folder_of(config)
    attempts.write(attempts.new(config), folder)
    first = keep(folder, ["false"], seen=0)
    assert first is not None and (first.state, first.tries) == ("failed", 1)
    assert keep(folder, ["false"], seen=0) == first  # decided before the first one was over
    again = keep(folder, ["false"], seen=1)
    assert again is not None and again.tries == 2


def test_a_claim_ends_with_its_last_holder(config: RunConfig) -> None:
    folder = attempts.folder_of(config)
    with attempts.claimed(folder) as mine:
        assert mine is not None
        child = multiprocessing.get_context("fork").Process(target=lambda: __import__("time").sleep(30))
        child.start()  # it inherits the handle
    with attempts.claimed(folder) as other:
        assert other is None
    child.kill()
    child.join()
    with attempts.claimed(folder) as other:
        assert other is not None
