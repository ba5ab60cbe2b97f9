"""Runs in pipeline stages beside the simulation of their schedules, by hand; and what is written of them."""

import math

import pytest

from research.report.pipelines import beside, timelines
from research.report.publish import write_tables
from research.settings import from_mapping, to_mapping


@pytest.fixture
def run(make_row):
    def made(arm, step_ms, activations, waited_ms=0.0, microbatches=4, **pp):
        config = to_mapping(from_mapping({"pp": pp, "train": {"microbatches": microbatches, "global_batch": 8}}))
        return make_row(
            arm,
            run_id=arm,
            config=config,
            step_ms=step_ms,
            exposed_comm_ms={"pp": waited_ms, "world": 3.0},
            rank_peak_bytes=[{"activations": activations - 1}, {"activations": activations}],
        )

    return made


@pytest.fixture
def one(run):
    return run("one", 100.0, 800)


def test_by_hand(run, one):
    """Two ranks, four microbatches: of ten slots of a rank two are waited, whichever of the two schedules."""
    rows = [one, run("1f1b", 70.0, 810, 21.0, degree=2), run("gpipe", 80.0, 1500, 20.0, degree=2, schedule="gpipe")]
    table = beside(rows)
    assert list(table.index) == ["1f1b", "gpipe"] and list(table.schedule) == ["1f1b", "gpipe"]
    assert table.loc["1f1b", ["ranks", "microbatches"]].to_list() == [2, 4]
    assert table.step_ms.to_list() == [70, 80] and table.step_ms_simulated.to_list() == pytest.approx([62.5, 62.5])
    assert table.bubble.to_list() == pytest.approx([0.3, 0.25])
    assert table.bubble_simulated.to_list() == pytest.approx([0.2, 0.2])
    assert table.activations_bytes.to_list() == [810, 1500]
    assert table.activations_bytes_simulated.to_list() == [800, 1600]  # two and four halves of a microbatch


def test_nothing_is_simulated_from_another_run(run):
    other = run("one", 100.0, 800, microbatches=8)
    (line,) = beside([other, run("1f1b", 70.0, 810, degree=2)]).to_dict("records")
    assert math.isnan(line["step_ms_simulated"]) and math.isnan(line["activations_bytes_simulated"])
    assert line["bubble_simulated"] == pytest.approx(0.2)


def test_a_schedule_whose_file_has_gone(run, one):
    rows = [one, run("mine", 70.0, 810, 7.0, degree=2, schedule="file:gone.csv")]
    (line,) = beside(rows).to_dict("records")
    assert math.isnan(line["bubble_simulated"]) and line["bubble"] == pytest.approx(0.1) and timelines(rows) == {}


def test_the_page_holds_both_and_shows_timelines(run, one, tmp_path):
    names = ("gpipe", "1f1b", "zb_h1")
    rows = [one, *(run(n, 70.0, 810, 21.0, degree=2, schedule=n) for n in names)]
    rows += [run(f"{n} each", 70.0, 810, 0.0, 8, degree=2, schedule="interleaved", stages_per_rank=n) for n in (2, 3)]
    page, _, *pictures = write_tables(tmp_path, "axes", rows)
    assert [p.name for p in pictures] == ["axes.png", "axes-pp2-4.png", "axes-pp2-8.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in pictures)
    text = page.read_text(encoding="utf-8")
    assert "../figures/axes-pp2-8.png" in text
    line = next(r for r in text.split("beside their simulation")[1].splitlines() if r.startswith("| 1f1b"))
    cells = [c.strip() for c in line.strip("|").split("|")]
    assert cells == ["1f1b", "1f1b", "2", "4", "70.0", "62.5", "30.0", "20.0", "0.000772", "0.000763"]
    drawn = {name: [(t.schedule.name, t.schedule.stages) for t in each] for name, each in timelines(rows).items()}
    assert drawn == {"pp2-4": [(n, 2) for n in sorted(names)], "pp2-8": [("interleaved", 4), ("interleaved", 6)]}
