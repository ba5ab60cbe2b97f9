"""Entry points as processes of their own: their words, their failures, no process left."""

import subprocess
import time
from pathlib import Path

import pytest

from research.launch import apart
from research.launch.apart import entry_point


def alive(text):
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if text in line]


@pytest.mark.timeout(60)
def test_it_says_what_the_command_line_says_without_colours(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = entry_point("schedule", "1f1b", "--ranks", "2", "--microbatches", "2")
    assert text.startswith("1f1b\nrank 0") and "step time" in text and "\x1b" not in text


@pytest.mark.timeout(60)
def test_a_failure_is_told_with_its_own_words():
    with pytest.raises(RuntimeError, match=r"experiments.schedule failed, exit status 2:\nschedule=zb3 is unknown"):
        entry_point("schedule", "zb3")


@pytest.mark.timeout(60)
def test_past_its_time_it_is_ended_with_its_ranks(tmp_path):
    mark = f"record.folder={tmp_path}"
    words = ["experiments/configs/tiny.yaml", "dp.degree=2", "train.steps=100000", "data.path=[LICENSE]", mark]
    with pytest.raises(TimeoutError, match=r"experiments\.run is not done after 8 s"):
        entry_point("run", *words, limit_s=8.0)
    end = time.monotonic() + 5
    while alive(mark) and time.monotonic() < end:
        time.sleep(0.1)
    assert alive(mark) == []


def test_it_starts_in_this_checkout():
    assert (apart.ROOT / "experiments" / "run.py").exists() and apart.ROOT.samefile(Path.cwd())
