"""Pipeline Parallelism with Controllable Memory (Qi et al., NeurIPS 2024, arXiv 2405.15362)."""

from collections.abc import Iterator
from pathlib import Path

from research.reproduce.cells import Cell, known, table
from research.reproduce.runs import run

PAPER = "controllable_memory"
NAMES = {
    "1F1B": "1f1b",
    "ZB1P": "zb_h1",
    "ZB2P": "zb_h2",
    "ZBV": "zbv",
    "V-ZB": "zbv",
    "V-Half": "v_half",
    "V-Min": "v_min",
}
RANKS = range(2, 33)


def cells(papers: Path) -> Iterator[Cell]:
    yield from exact_peaks(papers)
    yield from overview(papers)


def exact_peaks(papers: Path) -> Iterator[Cell]:
    """Peak activations in microbatches, for every number of ranks p from 2 to 32."""
    _, row = table(papers, PAPER, "exact peak")
    for p in RANKS:
        formulas = {"p": p, "(p+4)//3": (p + 4) // 3, "(p+2)//2": (p + 2) // 2}
        for column in ("1F1B", "V-Min", "V-Half", "V-ZB"):
            ours = max(run(NAMES[column], p, 3 * p).peaks())
            yield Cell("peak activations, microbatches", f"p={p}", column, known(formulas, row[column]), ours)


def overview(papers: Path) -> Iterator[Cell]:
    """Bubble (in units of 1F1B's, B), memory and messages against 1F1B's. The printed ones are what is left for many
    ranks p: ours may differ by one microbatch's share, 2/p."""
    bubble, memory, sent = table(papers, PAPER, "schedules")
    formulas = {"B": 1, "B/3": 1 / 3, "0": 0, "B/2": 1 / 2, "2B/3 + O(n) overhead": 2 / 3, "1": 1, "2": 2}
    formulas |= {"1/2": 1 / 2, "1/3": 1 / 3}
    for p in (8, 16, 32):
        base = run("1f1b", p, 4 * p)
        for column in list(bubble)[1:]:
            found = run(NAMES[column], p, 4 * p)
            where, near = f"p={p}", 2 / p
            part = max(found.waits) / max(base.waits)
            yield Cell("bubble over 1F1B's", where, column, known(formulas, bubble[column]), part, near)
            part = max(found.peaks()) / max(base.peaks())
            yield Cell("memory over 1F1B's", where, column, known(formulas, memory[column]), part, near)
            yield Cell("messages over 1F1B's", where, column, known(formulas, sent[column]), found.sent / base.sent)
