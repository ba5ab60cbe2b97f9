"""A rank that hangs is named, with what the others wait in."""

import os
import time

import pytest

from research.config import replace
from research.launch.local import RankError, start
from research.launch.watchdog import Stand, who_is_late
from research.mesh import total_ranks
from research.settings import load
from research.train import executor, loop, metrics
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


@pytest.mark.parametrize(
    ("words", "late", "kind", "nth", "told"),
    [
        ("pp.degree=3 train.microbatches=16", 2, "F", 1, "send of activations on axis pp (F): of ranks 1,2, ranks 2"),
        ("pp.degree=4 train.microbatches=8", 3, "F", 4, "send of activations on axis pp (F): of ranks 2,3, ranks 3"),
        ("pp.degree=2 train.microbatches=8", 1, "F", 1, "send of activations on axis pp (F): of ranks 0,1, ranks 1"),
    ],
)
def test_a_sleeping_stage_is_named(config, monkeypatch, words, late, kind, nth, told):
    """And not the stages between it and the rank whose patience ends first."""
    real, count = executor._Walk.run, iter(range(1, 1000))

    def sleeps(self, action):
        if action.kind == kind and self.built.mesh.rank == late and next(count) == nth:
            time.sleep(1000)
        real(self, action)

    monkeypatch.setattr(executor._Walk, "run", sleeps)
    changes = {"dp.degree": 1, "pp.schedule": "gpipe", "model.experts": 0}
    config = replace(config, changes | {k: int(v) for k, v in (word.split("=") for word in words.split())})
    with pytest.raises(RankError) as caught:
        start(lambda p, d: run(config, p, d), total_ranks(config), config.launch, 40.0)
    assert f"HangError: {told} did not arrive after 3 s (launch.timeout_s)" in str(caught.value)
    assert caught.value.rank != late


def test_who_waits_for_others_is_not_late():
    """0 waits for 1 and 2, and 1 for 3, which is asleep; 2 has come."""
    stands = [Stand({"a": 5}, "sum", (0, 1, 2), "a", 5), Stand({"a": 4, "b": 7}, "send", (1, 3), "b", 7)]
    stands += [Stand({"a": 5}), Stand({"b": 6})]
    assert who_is_late(stands.__getitem__, 0) == "send: of ranks 1,3, ranks 3 did not arrive"
    assert who_is_late(stands.__getitem__, 1) == "send: of ranks 1,3, ranks 3 did not arrive"
    assert who_is_late(stands.__getitem__, 2) == who_is_late(stands.__getitem__, 3) == ""


def test_the_nearest_late_ranks_are_told():
    """1 waits for 3, but 2 for nobody: one that all wait for is enough."""
    stands = [Stand({"a": 5}, "sum", (0, 1, 2), "a", 5), Stand({"a": 4}, "send", (1, 3), "b", 7), Stand(), Stand()]
    assert who_is_late(stands.__getitem__, 0) == "sum: of ranks 0,1,2, ranks 2 did not arrive"


def test_ranks_that_wait_for_each_other_are_told():
    stands = [Stand({"a": 2}, "sum", (0, 1), "a", 2), Stand({"a": 1, "b": 1}, "mean", (1, 0), "b", 1)]
    assert who_is_late(stands.__getitem__, 0) == "sum: ranks 0,1 wait for each other"


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
