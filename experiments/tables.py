"""Write and print the tables and figures of a results folder.

python -m experiments.tables                                        # every ablation with rows in results/rows
python -m experiments.tables results/reference/quickstart
python -m experiments.tables results quickstart                     # only this ablation; "runs" are the others
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from research.ablation import read
from research.config import ConfigError
from research.record import Row
from research.report.publish import by_ablation, write_tables

ABLATIONS = Path(__file__).parent / "ablations"


def main(words: Sequence[str]) -> int:
    if "--help" in words or "-h" in words or len(words) > 2:
        print((__doc__ or "").strip())
        return 0 if len(words) < 3 else 2
    folder, *only = words or ["results"]
    try:
        groups = by_ablation(folder)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if missing := [name for name in only if name not in groups]:
        print(f"no rows of {missing[0]} in {folder}/rows; there are: {', '.join(groups) or 'none'}", file=sys.stderr)
        return 1
    if not groups:
        print(f"no rows in {folder}/rows: `python -m experiments.run CONFIG` writes one", file=sys.stderr)
        return 1
    try:
        for ablation in only or groups:
            show(folder, ablation, groups[ablation])
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def show(folder: str | Path, ablation: str, rows: Sequence[Row] | None = None) -> None:
    """Write the tables of one ablation, print the page, and say where the files are."""
    rows = by_ablation(folder)[ablation] if rows is None else rows
    page, *others = write_tables(folder, ablation, rows, arms(ablation))
    text = page.read_text(encoding="utf-8")
    console = Console()
    console.print(Markdown(text)) if console.is_terminal else print(text)
    print("wrote", *(str(path) for path in (page, *others)))


def arms(ablation: str) -> list[str] | None:
    """Arms of an ablation in the order of its file; None where this checkout has no such file."""
    path = ABLATIONS / f"{ablation}.yaml"
    return list(read(path).arms) if path.exists() else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
