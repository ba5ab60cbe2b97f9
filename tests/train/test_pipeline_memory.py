"""What is alive between the actions of a schedule, in numbers and in bytes."""

import weakref

import pytest

from research.parallel.pp import schedule_of
from research.parallel.pp.check import check
from research.parallel.pp.generate import FAMILIES
from research.train import executor
from research.train.memory import peak_bytes
from research.train.storage import Storage
from tests.train.first_step import on_ranks


@pytest.mark.parametrize("name", FAMILIES)
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


def test_peak_bytes_of_a_v_grow_with_its_live_activations(layout):
    """4, 6 and 8 on each rank. Rank 0 is left out: what it has of 6 layers is embedding and head."""
    least, half, most = (peaks(layout, name, 4, 8)[1:] for name in ("v_min", "v_half", "zbv"))
    for low, middle, high in zip(least, half, most, strict=True):
        assert 1.7 * low < high < 2 * low
        assert middle == pytest.approx((low + high) / 2, rel=0.03)


def alive_in_weight_gradients(layout, monkeypatch):
    """On the last stage, for each W: how many of its kept products are alive when each weight gradient arrives."""
    run, accumulate = executor._Walk._weight_gradients, Storage.accumulate
    products, found = [], []

    def watched(self, action):
        products[:] = [weakref.ref(kept.gradients) for kept in self._kept[action[1:]]]
        found.append([])
        run(self, action)
        products.clear()

    def counted(self, parameter, gradient):
        if products:
            found[-1].append(sum(one() is not None for one in products))
        accumulate(self, parameter, gradient)

    monkeypatch.setattr(executor._Walk, "_weight_gradients", watched)
    monkeypatch.setattr(Storage, "accumulate", counted)
    config = layout("pp.degree=2", "pp.schedule=zb_h1")
    return on_ranks(config, lambda trainer, batches: trainer.backward(batches) and found)[-1]


def test_a_weight_gradient_lets_go_of_what_it_was_computed_from(layout, monkeypatch):
    for alive in alive_in_weight_gradients(layout, monkeypatch):
        assert alive == sorted(alive, reverse=True)
        assert set(alive) == set(range(1, alive[0] + 1)) and alive[0] > 10


def test_planted_products_held_until_all_are_computed(layout, monkeypatch):
    real = executor._Walk._weight_gradients

    def holding(self, action):
        held = self._kept[action[1:]].copy()
        real(self, action)
        held.clear()

    monkeypatch.setattr(executor._Walk, "_weight_gradients", holding)
    assert all(len(set(alive)) == 1 for alive in alive_in_weight_gradients(layout, monkeypatch))
