"""Write and print the tables and figures of a results folder.

python -m experiments.tables                                        # every ablation with rows in results/rows
python -m experiments.tables results/reference/quickstart
python -m experiments.tables results quickstart                     # only this ablation; "runs" are the others
python -m experiments.tables --latex                                # tables/*.tex as well
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from experiments.command import CHECKS
from research.ablation import Ablation, read, remembered, why_impossible
from research.record import Row
from research.report.absent import absent
from research.report.publish import by_ablation, write_tables
from research.sweep.state import attempts_in

ABLATIONS = Path(__file__).parent / "ablations"


def main(words: Sequence[str]) -> int:
    latex, places = "--latex" in words, [w for w in words if w != "--latex"]
    if len(places) > 2 or any(w.startswith("-") for w in places):
        print((__doc__ or "").strip())
        return 0 if {"--help", "-h"} & set(words) else 2
    folder, *only = places or ["results"]
    try:
        groups = by_ablation(folder)
        if missing := [name for name in only if name not in groups]:
            there = ", ".join(groups) or "none"
            print(f"no rows of {missing[0]} in {folder}/rows; there are: {there}", file=sys.stderr)
            return 1
        if not groups:
            print(f"no rows in {folder}/rows: `python -m experiments.run CONFIG` writes one", file=sys.stderr)
            return 1
        for name in only or groups:
            show(folder, name, groups[name], latex=latex)
    except ValueError as error:  # of a file that is no row, or no ablation
        print(error, file=sys.stderr)
        return 1
    return 0


def show(
    folder: str | Path,
    name: str,
    rows: Sequence[Row] | None = None,
    ablation: Ablation | None = None,
    impossible: Mapping[str, str] | None = None,
    latex: bool = False,
) -> None:
    """Write the tables of one ablation, print the page, and say where the files are. What the table is to hold is said
    by the ablation: the one that is given, or what was kept of it beside the rows, or the shipped one of this name."""
    rows = by_ablation(folder)[name] if rows is None else rows
    if ablation is None and (kept := remembered(folder, name)):
        ablation, impossible = kept
    path = ABLATIONS / f"{name}.yaml"
    if ablation is None and path.exists():
        ablation = read(path)
    if ablation is not None and impossible is None:
        impossible = why_impossible(ablation, (), CHECKS)
    missing = list(absent(rows, attempts_in(folder, name), ablation, impossible or {}))
    order, baseline = (list(ablation.arms), ablation.baseline) if ablation else (None, "")
    page, *others = write_tables(folder, name, rows, order, baseline, missing, latex)
    text = page.read_text(encoding="utf-8")
    console = Console()
    console.print(Markdown(text)) if console.is_terminal else print(text)
    print("wrote", *(str(path) for path in (page, *others)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
