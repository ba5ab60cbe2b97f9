"""Tables and figures of a results folder, written where a reader looks for them."""

from collections.abc import Sequence
from pathlib import Path

from research.files import write_atomically
from research.record import Row, load
from research.report.absent import Absent
from research.report.facts import is_cut
from research.report.figures import overview
from research.report.latex import latex
from research.report.tables import comparison, frame, markdown


def by_ablation(folder: str | Path) -> dict[str, list[Row]]:
    """The rows of a results folder; those outside any ablation stand under "runs".

    Raises ValueError for a file in FOLDER/rows that is no row.
    """
    groups: dict[str, list[Row]] = {}
    for row in load(folder):
        groups.setdefault(row.ablation or "runs", []).append(row)
    return groups


def write_tables(
    folder: str | Path,
    ablation: str,
    rows: Sequence[Row],
    order: Sequence[str] | None = None,
    baseline: str = "",
    absent: Sequence[Absent] = (),
    with_latex: bool = False,
) -> list[Path]:
    """Write FOLDER/tables/ABLATION.md, .csv, .tex if asked for, and FOLDER/figures/ABLATION.png, beside it timelines of
    pipelines where there are any; returns the paths.

    `order` names the wanted arms, `absent` the runs without a row. Raises ValueError where there are no rows.
    """
    page, data, paper = (Path(folder) / "tables" / f"{ablation}{suffix}" for suffix in (".md", ".csv", ".tex"))
    figure = Path(folder) / "figures" / f"{ablation}.png"
    picture = f"![Loss curves and throughput](../figures/{figure.name})\n"
    stages, timelines = _pipelines(rows, figure, order)
    write_atomically(page, f"{markdown(rows, ablation, order, baseline, absent)}\n{picture}{stages}".encode())
    write_atomically(data, frame(rows, order, absent).to_csv(index=False).encode())
    if with_latex:
        write_atomically(paper, latex(comparison(rows, ablation, order, baseline, absent)).encode())
    overview(rows, figure, order, title=ablation, baseline=baseline)
    return [page, data, *([paper] if with_latex else []), figure, *timelines]


def _pipelines(rows: Sequence[Row], figure: Path, order: Sequence[str] | None) -> tuple[str, list[Path]]:
    """What the page says of models that are cut into stages, and its pictures, written beside a figure."""
    if not any(map(is_cut, rows)):
        return "", []
    from research.report import pipelines  # only here: that axis can be removed

    text, paths = f"\n{pipelines.section(rows, order)}", []
    for name, drawn in pipelines.pictures(rows, order).items():
        paths.append(figure.with_name(f"{figure.stem}-{name}.png"))
        write_atomically(paths[-1], drawn)
        text += f"\n![Timelines of {name}](../figures/{paths[-1].name})\n"
    return text, paths
