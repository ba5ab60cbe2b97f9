"""GPipe (Huang et al., NeurIPS 2019, arXiv 1811.06965, section 2.3), 1F1B and interleaved 1F1B (Narayanan et al., SC21,
arXiv 2104.04473, section 2.2)."""

from collections.abc import Iterator
from pathlib import Path

from research.reproduce.cells import Cell, known, table
from research.reproduce.runs import run

PAPER = "gpipe"
NAMES = {"GPipe": "gpipe", "1F1B": "1f1b", "interleaved": "interleaved"}
TIMES = (3.0, 4.0, 2.0)
GRID = ((2, 4), (4, 8), (4, 32), (8, 8), (8, 32))  # ranks, microbatches


def cells(papers: Path) -> Iterator[Cell]:
    yield from rates(papers)
    yield from over_ideal(papers)
    yield from in_flight(papers)


def rates(papers: Path) -> Iterator[Cell]:
    """GPipe's own bubble: share of the step, K ranks and M microbatches; without re-materialisation all M are held."""
    rows = {row["quantity"]: row["value"] for row in table(papers, PAPER, "section 2: formulas")}
    for k, m in GRID:
        found = run("gpipe", k, m, TIMES)
        theirs = known({"O((K-1)/(M+K-1)); negligible when M >= 4K": (k - 1) / (m + k - 1)}, rows["bubble"])
        yield Cell("GPipe: bubble", f"K={k}, M={m}", "GPipe", theirs, found.timeline.bubble)
        theirs = known({"O(N L)": m}, rows["without"])
        yield Cell("GPipe: peak, microbatches", f"K={k}, M={m}", "GPipe", theirs, max(found.peaks()))


def over_ideal(papers: Path) -> Iterator[Cell]:
    """Bubble over the time without one, p ranks, m microbatches, v stages of a rank."""
    for row in table(papers, PAPER, "section 2.2"):
        for p, m in GRID:
            for v in (2, 3, 4) if row["schedule"] == "interleaved" else (1,):
                found = run(NAMES[row["schedule"]], p, m, TIMES, per_rank=v)
                theirs = known({"(p-1)/m": (p - 1) / m, "(p-1)/(v m)": (p - 1) / (v * m)}, row["bubble"])
                ours = max(found.idle) / found.timeline.busy(0)
                yield Cell("bubble over ideal", f"p={p}, m={m}, v={v}", row["schedule"], theirs, ours)


def in_flight(papers: Path) -> Iterator[Cell]:
    """Stage-microbatches that rank i holds at most: p, p - 1, ... 1 of 1F1B."""
    for row in table(papers, PAPER, "in-flight"):
        schedule = row["schedule"].split()[0]
        for p, m in GRID:
            for v in (2, 3, 4) if schedule == "interleaved" else (1,):
                counts = run(NAMES[schedule], p, m, per_rank=v).peaks()
                for i, count in enumerate(counts):
                    formulas = {
                        "m": m,
                        "min(m, p-i)": min(m, p - i),
                        "min(m v, 2(p-i-1)+(v-1)p+1)": min(m * v, 2 * (p - i - 1) + (v - 1) * p + 1),
                    }
                    theirs = known(formulas, row["stage i"])
                    yield Cell("in flight", f"p={p}, m={m}, v={v}, i={i}", schedule, theirs, count * v)
