"""What is alive between the actions of a schedule, in numbers and in bytes."""


import pytest

from research.parallel.pp import schedule_of
from research.parallel.pp.check import check
from research.train import executor
from research.train.memory import peak_bytes
from tests.train.first_step import on_ranks


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "zb_h2", "zbv", "v_min", "dualpipe", "dualpipe_v"])
def test_live_activations_are_those_that_the_checker_counts(layout, monkeypatch, name):
    most = [0]
    real = executor._Walk.run

    def counted(self, action):
        real(self, action)
        most[0] = max(most[0], len(self._roots) + len(self._kept))

    monkeypatch.setattr(executor._Walk, "run", counted)
    config = layout("pp.degree=2", f"pp.schedule={name}", "train.microbatches=8", "model.experts=0")
    found = on_ranks(config, lambda trainer, batches: trainer.backward(batches) and most[0])
    assert tuple(found) == check(schedule_of(config.pp, 8)).live


def peaks(layout, name, ranks, microbatches):
    """Bytes of activations in the fullest moment, of each rank."""
    words = [f"pp.degree={ranks}", f"pp.schedule={name}", f"train.global_batch={4 * microbatches}"]
    words += ["model.experts=0", "train.dtype=float32", f"train.microbatches={microbatches}", "model.layers=6"]
    return on_ranks(layout(*words), lambda t, b: peak_bytes(t, b)["activations"])


def test_peak_bytes_are_those_of_the_live_activations(layout):
    """gpipe's grow with the microbatches, 1f1b's do not; zb_h1 holds what W needs a little longer."""
    live = peaks(layout, "1f1b", 2, 4)[0]  # of two microbatches
    assert peaks(layout, "1f1b", 2, 8)[0] == pytest.approx(live, rel=0.05)
    assert 3.4 < peaks(layout, "gpipe", 2, 8)[0] / live < 4.2
    assert peaks(layout, "zb_h1", 2, 8)[0] < 1.5 * live
