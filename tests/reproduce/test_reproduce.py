"""Published figures, ours beside them: all of them, cell by cell, and a wrong one is told."""

import dataclasses
from collections import Counter
from pathlib import Path

import pytest

import experiments.reproduce
from experiments.reproduce import main
from research.reproduce import cells as cells_module
from research.reproduce import zero
from research.reproduce.cells import Cell, known
from research.reproduce.registry import PAPERS

FIGURES = Path(experiments.reproduce.__file__).parent / "papers"


@pytest.fixture(scope="module")
def found():
    return {paper: list(cells(FIGURES)) for paper, cells in PAPERS.items()}


@pytest.mark.parametrize("paper", PAPERS)
def test_every_figure_matches(found, paper):
    assert [c for c in found[paper] if not c.matches] == []
    assert (
        len({(c.table, c.row, c.column) for c in found[paper]}) == len(found[paper]) > (50 if paper == "zero" else 100)
    )


def test_zero_bubble_table_5_to_four_decimals(found):
    cells = [c for c in found["zero_bubble"] if c.table.startswith("Table 5")]
    exact = [c for c in cells if c.column in ("1F1B", "ZB-H1", "ZB-H2")]
    assert len(exact) == 36
    assert [c for c in exact if round(c.ours, 4) != c.theirs] == []
    interleaved = [c.difference / c.theirs for c in cells if c.column == "1F1B-I"]
    assert len(interleaved) == 12 and min(interleaved) >= 0.023 and max(interleaved) <= 0.041


def test_peaks_for_2_to_32_ranks(found):
    cells = [c for c in found["controllable_memory"] if c.table.startswith("peak")]
    assert Counter(c.column for c in cells) == {"1F1B": 31, "V-Min": 31, "V-Half": 31, "V-ZB": 31}
    assert [c for c in cells if c.ours != c.theirs] == []


def test_zero_counts_54_cells_of_table_1(found):
    cells = [c for c in found["zero"] if c.table == "Table 1"]
    assert len(cells) == 54 and len({c.row for c in cells}) == 6
    assert [c for c in cells if c.within not in (1.0, 0.1, 0.01)] == []
    volumes = [c.ours for c in found["zero"] if c.table == "Section 7"]
    assert volumes == [2.0, 2.0, 2.0, 3.0]


def test_planted_gradients_that_stay_whole_show_in_the_figures(monkeypatch):
    """A second stage that cuts nothing more than the first one."""
    monkeypatch.setitem(zero.STAGES, "Pos+g", 1)
    wrong = [c for c in zero.figure(FIGURES) if not c.matches]
    assert [c.column for c in wrong] == ["Pos+g"]


def test_a_figure_that_differs_is_told(capsys, monkeypatch):
    def wrong(papers):
        first, *rest = PAPERS_BEFORE["dualpipe"](papers)
        yield dataclasses.replace(first, theirs=first.theirs + 0.01)
        yield from rest

    PAPERS_BEFORE = dict(PAPERS)
    monkeypatch.setattr(experiments.reproduce, "PAPERS", {**PAPERS, "dualpipe": wrong})
    assert main(["dualpipe"]) == 1
    out = capsys.readouterr().out
    assert "dualpipe: 125 of 126 figures match" in out and out.count("DIFFERS") == 1
    monkeypatch.setattr(experiments.reproduce, "PAPERS", PAPERS)
    assert main(["dualpipe", "dualpipe"]) == 0


def test_unknown_papers_are_refused(capsys):
    assert main(["zeros", "gpipe"]) == 2
    assert (
        "unknown papers: zeros; legal: zero_bubble, controllable_memory, dualpipe, gpipe, zero\n"
        in capsys.readouterr().err
    )


def test_cells_match_within_what_they_state():
    cell = Cell("t", "r", "c", theirs=2.0, ours=2.1)
    assert not cell.matches
    assert dataclasses.replace(cell, within=0.11).matches
    assert dataclasses.replace(cell, between=(0.04, 0.06)).matches
    assert not dataclasses.replace(cell, between=(0.06, 0.08)).matches
    assert not dataclasses.replace(cell, ours=float("nan")).matches


def test_a_formula_that_the_code_does_not_know_is_told():
    with pytest.raises(ValueError, match=r"formula '\(p-2\)F' is not known"):
        known({"(p-1)F": 1.0}, "(p-2)F")


def test_every_file_of_figures_names_its_source():
    for paper in PAPERS:
        titles = cells_module.yaml.safe_load((FIGURES / f"{paper}.yaml").read_text())
        assert all(t["source"] and t["citation"] and t["rows"] for t in titles)
