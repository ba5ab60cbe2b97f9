"""A rank that hangs is named, with the collective that the others wait in."""

import os
import time

import pytest

from research.config import replace
from research.launch.local import RankError, start
from research.settings import load
from research.train import loop, metrics
from research.train import run as run_module
from research.train.run import run


@pytest.fixture
def config(text, tmp_path):
    words = [f"data.path={text}", f"data.cache={tmp_path}/cache", f"record.folder={tmp_path}", "train.steps=50"]
    return load("experiments/configs/tiny.yaml", [*words, "dp.degree=3", "launch.timeout_s=3"])


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize(("where", "what"), [("backward", "expert counts"), ("queue", "gradient norm")])
def test_a_sleeping_rank_is_named(config, monkeypatch, late, where, what):
    """In the fourth step, before a forward or before an optimizer step."""
    real = getattr(loop.Trainer, where)
    steps = iter(range(1000))

    def sleeps(self, *words):
        if next(steps) == 3 and self.mesh.rank == late:
            time.sleep(1000)
        return real(self, *words)

    monkeypatch.setattr(loop.Trainer, where, sleeps)
    begin = time.monotonic()
    with pytest.raises(RankError) as caught:
        start(lambda p, d: run(config, p, d), 3, config.launch, 40.0)
    assert f"all_reduce of {what} on axis" in str(caught.value)
    assert f"of ranks 0,1,2, ranks {late} did not arrive after 3 s (launch.timeout_s)" in str(caught.value)
    assert caught.value.rank != late
    assert time.monotonic() - begin < 15


def test_a_slow_rank_is_waited_for(config, monkeypatch):
    """Slower than a look, faster than the limit."""
    real = loop.Trainer.queue

    def slow(self, index, sums):
        if index == 1 and self.mesh.rank == 1:
            time.sleep(2.0)
        return real(self, index, sums)

    monkeypatch.setattr(loop.Trainer, "queue", slow)
    config = replace(config, {"train.steps": 3, "train.warmup_steps": 1})
    assert len({r.run_id for r in start(lambda p, d: run(config, p, d), 3, config.launch, 40.0)}) == 1


def test_a_thread_that_fails_ends_its_rank(config):
    def body(place, device):
        import threading

        if place.rank == 1:
            threading.Thread(target=lambda: os.fspath(None)).start()
        time.sleep(30)

    with pytest.raises(RankError, match="expected str, bytes or os") as caught:
        start(body, 2, config.launch, 20.0)
    assert caught.value.rank == 1


@pytest.mark.parametrize(
    ("module", "where", "what"),
    [
        (run_module, "require_alike", "all_gather of start on axis world"),
        (run_module, "make_row", "all_reduce of expert counts on axis stage"),  # in the step that measures memory
        (metrics, "_exposed", "all_reduce of expert counts on axis stage"),
        (metrics, "active_parameters", None),  # after the last collective: nobody waits for it but the farewell
    ],
)
def test_a_rank_that_hangs_before_or_after_training_is_named(config, monkeypatch, module, where, what):
    real = getattr(module, where)
    rank = [0]

    def body(place, device):
        rank[0] = place.rank
        return run(config, place, device)

    def sleeps(*words):
        if rank[0] == 1:
            time.sleep(1000)
        return real(*words)

    monkeypatch.setattr(module, where, sleeps)
    config = replace(config, {"train.steps": 2})
    if what is None:
        with pytest.raises(TimeoutError, match=r"ranks \[1\] of 3 are not done 8 s after ranks"):
            start(body, 3, config.launch, 40.0)
    else:
        with pytest.raises(RankError, match=rf"{what} .*ranks 1 did not arrive after 3 s"):
            start(body, 3, config.launch, 40.0)
