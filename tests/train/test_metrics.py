"""From steps to the numbers of a row, by hand; and ranks that must agree before they train."""

import dataclasses
import math
import time

import pytest

from research.config import replace
from research.data import tokens
from research.launch.local import start
from research.problems import ConfigError
from research.settings import load
from research.train import loop, run
from research.train.loop import Step
from research.train.metrics import speed_of, timed_steps


def steps(*ms: float) -> list[Step]:
    return [Step(i, 1.0, 0.0, 1.0, 100 * (i + 1), False, m, {"dp": m / 10}, {}) for i, m in enumerate(ms)]


def test_speed_by_hand():
    timed = timed_steps(steps(9000, 10, 20, 30, 40), 1)
    assert [s.ms for s in timed] == [10, 20, 30, 40]
    tokens_per_s, median, iqr = speed_of(timed)
    assert tokens_per_s == pytest.approx((200 + 300 + 400 + 500) / 0.1)
    assert (median, iqr) == (25, 15)  # quartiles 17.5 and 32.5


def test_what_was_not_measured_is_not_told():
    """A run that is all warm-up has no speed, one timed step no spread; a traced step is not timed."""
    assert all(map(math.isnan, speed_of(timed_steps(steps(9000, 10), 5))))
    speed = speed_of(timed_steps(steps(9000, 10), 1))
    assert speed[:2] == (pytest.approx(20000), 10) and math.isnan(speed.step_ms_iqr)
    assert [s.ms for s in timed_steps(steps(9000, 10, 20, 500), 1, profiled=True)] == [10, 20]


def test_skipped_steps_train_on_nothing():
    timed = [dataclasses.replace(s, skipped=s.index == 1) for s in steps(10, 10)]
    assert speed_of(timed).tokens_per_s == pytest.approx(100 / 0.02)


@pytest.fixture
def config(text, tmp_path):
    words = [f"data.path={text}", f"data.cache={tmp_path}/cache", f"record.folder={tmp_path}", "train.steps=6"]
    return load("experiments/configs/tiny.yaml", [*words, "dp.degree=2", "record.warmup_steps=2"])


def test_waits_of_the_warm_up_stay_out(config, monkeypatch):
    """Rank 1 comes a second late to the first step, which says nothing of a layout."""
    real = loop.Trainer.backward

    def late(self, microbatches):
        if self.mesh.rank == 1 and not self.storage.optimizer.state:
            time.sleep(1.0)
        return real(self, microbatches)

    monkeypatch.setattr(loop.Trainer, "backward", late)
    row = start(lambda p, d: run.run(config, p, d), 2, config.launch, 60.0)[0]
    assert sum(row.exposed_comm_ms.values()) < 150
    assert row.step_ms < 500 and math.isfinite(row.step_ms_iqr)


@pytest.mark.parametrize("what", ["train.seed", "text of data.path"])
def test_ranks_that_differ_are_refused(config, monkeypatch, tmp_path, what):
    """Two nodes with other texts behind one path, or other words behind one command."""

    def body(place, device):
        mine = config
        if place.rank == 1 and what == "train.seed":
            mine = replace(config, {"train.seed": 1})
        if place.rank == 1 and what != "train.seed":
            other = tmp_path / "other.txt"
            other.write_text("another text on this node\n" * 100)
            real = tokens.find
            monkeypatch.setattr(tokens, "find", lambda path: real(str(other)))
        return run.run(mine, place, device)

    with pytest.raises(ConfigError, match=rf"{what} of ranks \[1\]=\w+ differs from rank 0's"):
        start(body, 2, config.launch, 60.0)
