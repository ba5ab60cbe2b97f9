"""Schedules take on ranks what their simulations say, in the same order."""

import pytest

from experiments import pipeline
from research.bench.pipeline import computed, one_by_one, slept
from research.parallel.pp.generate import FAMILIES, generate
from research.parallel.pp.simulate import even, simulate
from research.settings import load

SLEPT = ["pp.degree=4", "model.layers=6", "train.microbatches=8", "train.dtype=float32", "model.experts=0"]
SLOW = pytest.mark.slow


@pytest.fixture
def config(text, tmp_path):
    def made_of(name, *words):
        given = [f"data.path={text}", f"data.cache={tmp_path}", f"pp.schedule={name}", *words]
        return load("experiments/configs/tiny.yaml", given)

    return made_of


def alike(found, tolerance):
    """Each within the tolerance, and whoever is clearly faster simulated is faster measured."""
    for one in found:
        assert one.measured_ms == pytest.approx(one.simulated_ms, rel=tolerance), found
    for one in found:
        for other in found:
            if one.simulated_ms < (1 - tolerance) * other.simulated_ms:
                assert one.measured_ms < other.measured_ms, found


def test_pairs_are_simulated_as_they_are_run():
    """The first of a pair hands over what it made before the second starts: no later than where a pair is one."""
    for name, pair, apart in (("dualpipe", 26, 25), ("dualpipe_v", 27, 25.5), ("zbv", 25.5, 25.5)):
        schedule = generate(name, 4, 8)
        run = one_by_one(schedule)
        assert [simulate(s, even(s, 1, 1, 1)).step for s in (schedule, run)] == [pair, apart]
        assert [[*run.flat(r)] for r in range(4)] == [[*schedule.flat(r)] for r in range(4)]


@pytest.mark.slow  # and measures: a busy machine shows
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "names", [("1f1b", "interleaved", "zbv"), pytest.param(tuple(FAMILIES), marks=SLOW)], ids=["three", "all"]
)
def test_sleeping_stages_take_their_simulated_time(config, names):
    alike([slept(config(name, *SLEPT), 0.1, 0.1, 0.1) for name in names], 0.1)


@SLOW
def test_computing_stages_take_their_simulated_time(config):
    words = ["pp.degree=2", "model.layers=8", "train.microbatches=8", "train.dtype=float32", "model.experts=0"]
    words += ["model.dim=256", "model.ffn=768", "data.sequence=256"]
    alike([computed(config(name, *words)) for name in ("gpipe", "1f1b", "zb_h1", "zbv")], 0.15)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        *(
            (f"1f1b ms={ms}", f"ms={ms} is no time of a pass; legal: a number of milliseconds, more than 0\n")
            for ms in ("0", "-3", "abc", "", "nan", "inf")
        ),
        ("1f1b zbw", "pp.schedule=zbw is unknown; legal: gpipe"),
    ],
)
def test_bad_words_are_told_before_anything_is_measured(capsys, monkeypatch, words, told):
    monkeypatch.delattr(pipeline, "slept")
    assert pipeline.main(words.split()) == 2
    assert told in capsys.readouterr().err
