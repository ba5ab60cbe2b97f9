"""Tables and figures of a results folder, written where a reader looks for them."""

from collections.abc import Sequence
from pathlib import Path

from research.files import write_atomically
from research.record import Row, load
from research.report.figures import overview
from research.report.tables import frame, markdown


def by_ablation(folder: str | Path) -> dict[str, list[Row]]:
    """The rows of a results folder; those outside any ablation stand under "runs".

    Raises ValueError for a file in FOLDER/rows that is no row.
    """
    groups: dict[str, list[Row]] = {}
    for row in load(folder):
        groups.setdefault(row.ablation or "runs", []).append(row)
    return groups


def write_tables(
    folder: str | Path, ablation: str, rows: Sequence[Row], order: Sequence[str] | None = None
) -> list[Path]:
    """Write FOLDER/tables/ABLATION.md and .csv and FOLDER/figures/ABLATION.png; returns the three paths.

    `order` names the wanted arms, the baseline first. Raises ValueError where there are no rows.
    """
    page, data = (Path(folder) / "tables" / f"{ablation}{suffix}" for suffix in (".md", ".csv"))
    figure = Path(folder) / "figures" / f"{ablation}.png"
    picture = f"![Loss curves and throughput](../figures/{figure.name})\n"
    write_atomically(page, f"{markdown(rows, ablation, order)}\n{picture}".encode())
    write_atomically(data, frame(rows, order).to_csv(index=False).encode())
    overview(rows, figure, order, title=ablation)
    return [page, data, figure]
