"""DualPipe (DeepSeek-V3, arXiv 2412.19437, Table 2; README of deepseek-ai/DualPipe)."""

from collections.abc import Iterator
from pathlib import Path

from research.reproduce.cells import Cell, known, table
from research.reproduce.runs import Run, run

PAPER = "dualpipe"
NAMES = {"1F1B": "1f1b", "ZB1P": "zb_h1", "DualPipe": "dualpipe", "DualPipeV": "dualpipe_v"}
# F, B of the input, W, and an overlapped pair as a share of its two parts.
TIMES = (((1.0, 1.0, 1.0), 1.0), ((1.0, 1.0, 1.0), 0.8), ((2.0, 2.0, 1.0), 1.0), ((4.0, 4.0, 3.0), 0.9))


def cells(papers: Path) -> Iterator[Cell]:
    for title in ("bubble and memory", "Table 2"):
        for row in table(papers, PAPER, title):
            for stages in (4, 8, 16):
                yield from _row(title, row, stages)


def _row(title: str, row: dict[str, str], pp: int) -> Iterator[Cell]:
    """PP is the number of stages: twice the ranks of DualPipeV."""
    method = row["method"]
    ranks = int(known({"PP": pp, "PP/2": pp / 2}, row.get("devices", "PP")))
    for times, overlap in TIMES:
        scaled = tuple(t * pp / ranks for t in times)
        found = run(NAMES[method], ranks, 4 * pp, (scaled[0], scaled[1], scaled[2]), overlap=overlap)
        f, b, w = times[0], times[1] + times[2], times[2]
        pair = overlap * (f + b)
        formulas = {
            "(PP-1)(F+B)": (pp - 1) * (f + b),
            "(PP-1)(F+B-2W)": (pp - 1) * (f + b - 2 * w),
            "(PP/2-1)(F&B+B-3W)": (pp / 2 - 1) * (pair + b - 3 * w),
        }
        where = f"PP={pp}, F={f:g} B={b:g} W={w:g} F&B={pair:g}"
        yield Cell(f"{title}: bubble", where, method, known(formulas, row["bubble"]), max(found.idle))
    yield from _memory(title, row, pp, found)


def _memory(title: str, row: dict[str, str], pp: int, found: Run) -> Iterator[Cell]:
    """In units of one of PP stages."""
    schedule = found.timeline.schedule
    held = max(map(len, schedule.holds)) * pp / schedule.stages
    yield Cell(f"{title}: parameters", f"PP={pp}", row["method"], known({"1x": 1, "2x": 2}, row["parameters"]), held)
    theirs = known({"PP": pp, "PP+1": pp + 1}, row["activation"])
    ours = max(found.peaks()) * pp / schedule.ranks
    yield Cell(f"{title}: activations", f"PP={pp}", row["method"], theirs, ours)
