"""Print published figures, ours beside them, and the difference. Exit status 1 where one does not match.

    python -m experiments.reproduce              # every paper
    python -m experiments.reproduce zero gpipe   # these, of: zero_bubble, controllable_memory, dualpipe, gpipe, zero

The published figures stand in experiments/papers/, each with its source.
"""

import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from research.reproduce.cells import Cell
from research.reproduce.registry import PAPERS

FIGURES = Path(__file__).parent / "papers"


def show(paper: str, cells: Iterable[Cell], console: Console) -> tuple[int, int]:
    """Print a table for each of a paper's tables; returns how many cells match, of how many."""
    found = list(track(cells, paper, console=Console(stderr=True), transient=True))
    for title, group in groupby(sorted(found, key=lambda c: c.table), key=lambda c: c.table):
        table = Table("", "", "theirs", "ours", "difference", "", title=f"{paper}, {title}", title_justify="left")
        for c in group:
            verdict = "equal" if c.matches and c.between is None else "as stated" if c.matches else "DIFFERS"
            near = f"{c.difference:+.1e}" if abs(c.difference) > 1e-9 else "0"
            table.add_row(c.row, c.column, f"{c.theirs:.7g}", f"{c.ours:.5g}", near, verdict)
        console.print(table)
    return sum(c.matches for c in found), len(found)


def main(words: Sequence[str]) -> int:
    if "--help" in words or "-h" in words:
        print((__doc__ or "").strip())
        return 0
    if unknown := [word for word in words if word not in PAPERS]:
        print(f"unknown papers: {', '.join(unknown)}; legal: {', '.join(PAPERS)}", file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 120)
    counts = {paper: show(paper, PAPERS[paper](FIGURES), console) for paper in dict.fromkeys(words or PAPERS)}
    for paper, (matching, total) in counts.items():
        print(f"{paper}: {matching} of {total} figures match")
    return int(any(matching < total for matching, total in counts.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
