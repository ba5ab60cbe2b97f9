"""Zero Bubble Pipeline Parallelism (Qi et al., ICLR 2024, arXiv 2401.10241): Tables 2 and 5."""

from collections.abc import Iterator
from pathlib import Path

from research.reproduce.cells import Cell, known, table
from research.reproduce.runs import run

PAPER = "zero_bubble"
PRINTED = 0.00005 + 1e-12  # half of the last printed digit
# The paper's interleaved figures are lower than its own times and our simulation of Megatron's order give; it does not
# say how they were obtained.
INTERLEAVED = (0.023, 0.041)
NAMES = {"1F1B": "1f1b", "ZB-H1": "zb_h1", "ZB-H2": "zb_h2"}


def cells(papers: Path) -> Iterator[Cell]:
    yield from bubbles_and_memory(papers)
    yield from bubble_rates(papers)


def bubble_rates(papers: Path) -> Iterator[Cell]:
    """Table 5 from the times of Table 9. An interleaved rank holds as many stages as it has layers, embedding and head
    counted as one each (Table 3). ZB-1p, found by search, came out as ZB-H1."""
    models = {row["model"]: row for row in table(papers, PAPER, "Table 3")}
    times = {(row["model"], row["m"]): row for row in table(papers, PAPER, "Table 9")}
    for row in table(papers, PAPER, "Table 5"):
        model, m = row["model"], row["m"]
        ranks = models[model]["stages"]
        t = times[model, m]
        given = (t["TF"], t["TB"], t["TW"]), t["Tcomm"]
        for column, name in (*NAMES.items(), ("ZB-1p", "zb_h1")):
            ours = run(name, ranks, m, *given).rate
            yield Cell("Table 5, bubble rate", f"{model}, m={m}", column, row[column], ours, PRINTED)
        chunks = (models[model]["layers"] + 2) // ranks
        ours = round(run("interleaved", ranks, m, *given, per_rank=chunks).rate, 4)  # as theirs is printed
        yield Cell("Table 5, bubble rate", f"{model}, m={m}", "1F1B-I", row["1F1B-I"], ours, between=INTERLEAVED)


def bubbles_and_memory(papers: Path) -> Iterator[Cell]:
    """Table 2, for several numbers of ranks p, with TF=4 TB=4 TW=3, MB=5 MW=2. Its worker i counts from 1."""
    f, b, w, mb, mw = 4.0, 4.0, 3.0, 5.0, 2.0
    rows = {row["schedule"]: row for row in table(papers, PAPER, "Table 2")}
    for p in (2, 4, 8, 16):
        bubble = {
            "(p-1)(TF+TB+TW)": (p - 1) * (f + b + w),
            "(p-1)(TF+TB-TW)": (p - 1) * (f + b - w),
            "(p-1)(TF+TB-2TW)": (p - 1) * (f + b - 2 * w),
        }
        peak = {"p MB": p * mb, "(2p-1) MB": (2 * p - 1) * mb}
        for schedule, name in NAMES.items():
            found = run(name, p, 4 * p, (f, b, w))
            row = rows[schedule]
            yield Cell("Table 2, bubble", f"p={p}", schedule, known(bubble, row["bubble"]), max(found.waits))
            most = found.peaks(mb, mw)
            yield Cell("Table 2, peak", f"p={p}", schedule, known(peak, row["peak activation"]), max(most))
            for i in range(1, p + 1 if f"worker i, {schedule}" in rows else 1):
                worker = {
                    "(p-i+1)MB + (i-1)MW": (p - i + 1) * mb + (i - 1) * mw,
                    "(2p-2i+1)MB + (2i-2)MW": (2 * p - 2 * i + 1) * mb + (2 * i - 2) * mw,
                }
                theirs = known(worker, rows[f"worker i, {schedule}"]["peak activation"])
                yield Cell("Table 2, peak of a worker", f"p={p}, i={i}", schedule, theirs, most[i - 1])
