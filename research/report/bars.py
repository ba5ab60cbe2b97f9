"""Figures of rows, part by part: memory by category, traffic by axis, load of every expert, one column over another."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from research.record import Row
from research.report.figures import COLOURS
from research.report.lines import Line, arm_of, lines

MIB = 2**20


def memory(rows: Iterable[Row], order: Sequence[str] | None = None) -> Figure:
    """`peaks` as bars. Raises ValueError without rows."""
    return stacked(peaks(rows, order), "peak memory of a rank in a step (MiB)")


def peaks(rows: Iterable[Row], order: Sequence[str] | None = None) -> pd.DataFrame:
    """The fullest moment of a step, of the rank that needs most, MiB: a line an arm, a column a category, in the order
    of the rows. Raises ValueError without rows."""
    found = lines(rows, order)
    kinds = list(dict.fromkeys(c for line in found for c in line.rows[0].peak_bytes))
    return _parts(found, lambda r: r.peak_bytes, kinds)


def traffic(rows: Iterable[Row], order: Sequence[str] | None = None) -> Figure:
    """`received` as bars. Raises ValueError without rows."""
    return stacked(received(rows, order), "received by a rank in a step (MiB)")


def received(rows: Iterable[Row], order: Sequence[str] | None = None) -> pd.DataFrame:
    """What one rank receives in a step, MiB: a line an arm, a column an axis. Raises ValueError without rows."""
    found = lines(rows, order)
    axes = sorted({axis for line in found for axis in line.rows[0].comm_bytes})
    return _parts(found, lambda r: {axis: sum(labels.values()) for axis, labels in r.comm_bytes.items()}, axes)


def _parts(found: Sequence[Line], of: Callable[[Row], Mapping[str, float]], pieces: Sequence[str]) -> pd.DataFrame:
    """Mean over seeds, in MiB. A piece that no line has is left out."""
    columns = {p: [line.mean(lambda r, p=p: of(r).get(p, 0.0)) / MIB for line in found] for p in pieces}  # type: ignore[misc]
    table = pd.DataFrame(columns, index=pd.Index([line.name for line in found], name="arm"))
    return table.loc[:, table.any()]


def stacked(table: pd.DataFrame, label: str) -> Figure:
    """A bar for each line of the table, a piece for each column, and the sum behind it."""
    figure = Figure(figsize=(7.2, 1.5 + 0.36 * len(table)), layout="constrained")
    axes = figure.subplots()
    left = np.zeros(len(table))
    for i, piece in enumerate(table):
        axes.barh(range(len(table)), table[piece], left=left, color=COLOURS[i % len(COLOURS)], label=piece, height=0.7)
        left += table[piece].to_numpy()
    for place, total in enumerate(left):
        tip = (total, place)
        axes.annotate(f"{total:,.3g}", tip, (4, 0), textcoords="offset points", va="center", fontsize="small")
    axes.set(xlabel=label, yticks=range(len(table)), yticklabels=table.index)
    axes.set_ylim(len(table) - 0.5, -0.5)
    axes.margins(x=0.12)
    _quiet(axes)
    if len(table.columns):
        figure.legend(loc="outside upper center", ncols=6, fontsize="small", frameon=False)
    return figure


def expert_loads(rows: Iterable[Row]) -> Figure:
    """Share of the choices that each expert got over a run, over the even share: a panel a row, a line an MoE layer, a
    column an expert. White is even. Raises ValueError where no row has experts."""
    found = [r for r in rows if r.expert_choices]
    if not found:
        raise ValueError("no row has experts")
    loads = [load_of(r) for r in found]
    most = max(float(t.to_numpy().max()) for t in loads)
    height = sum(0.9 + 0.28 * len(t) for t in loads)
    figure = Figure(figsize=(8, height + 0.3), layout="constrained")
    panels = figure.subplots(len(found), squeeze=False, height_ratios=[0.9 + 0.28 * len(t) for t in loads])[:, 0]
    for row, load, axes in zip(found, loads, panels, strict=True):
        image = axes.imshow(load, cmap="RdBu_r", norm=TwoSlopeNorm(1, 0, max(most, 2)), aspect="auto")
        axes.set(yticks=range(len(load)), yticklabels=load.index)
        axes.set_xticks(range(load.shape[1]), [str(e) for e in load.columns], fontsize="x-small")
        axes.set_title(f"{arm_of(row)}: busiest {load.to_numpy().max():.2f} of the even share", fontsize="medium")
    panels[-1].set_xlabel("expert")
    figure.colorbar(image, ax=list(panels), label="choices over the even share", aspect=30)
    return figure


def load_of(row: Row) -> pd.DataFrame:
    """A line for each MoE layer, a column for each expert: its choices over the mean of the layer."""
    choices = pd.DataFrame.from_dict(row.expert_choices, orient="index")
    return choices.div(choices.mean(axis=1), axis=0).rename_axis("layer").rename_axis("expert", axis=1)


def heat(table: pd.DataFrame, label: str) -> Figure:
    """A table of numbers as a map, each cell with its number."""
    values = table.to_numpy(dtype=float)
    lines, columns = values.shape
    figure = Figure(figsize=(1.6 + 0.62 * columns, 1.2 + 0.45 * lines), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(values, cmap="Blues", vmin=0, aspect="auto")
    for (i, j), value in np.ndenumerate(values):
        colour = "white" if value > values.max() / 2 else "black"
        axes.text(j, i, f"{value:,.4g}", ha="center", va="center", color=colour)
    axes.set(xticks=range(columns), xticklabels=table.columns, yticks=range(lines), yticklabels=table.index)
    axes.set(xlabel=table.columns.name, ylabel=table.index.name)
    figure.colorbar(image, label=label)
    return figure


def scatter(table: pd.DataFrame, x: str, y: str, name: str = "arm") -> Figure:
    """Two columns of a table against each other; a point has the names of all that lie on it."""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    points: dict[tuple[str, str], list[int]] = {}
    for i, point in enumerate(zip(table[x], table[y], strict=True)):
        points.setdefault((f"{point[0]:.6g}", f"{point[1]:.6g}"), []).append(i)
    for number, places in enumerate(points.values()):
        across, up = table[x].iloc[places[0]], table[y].iloc[places[0]]
        axes.plot(across, up, "o", markersize=9, color=COLOURS[number % len(COLOURS)])
        text = ", ".join(str(n) for n in table[name].iloc[places])
        axes.annotate(text, (across, up), (7, 4), textcoords="offset points", fontsize="small")
    axes.set(xlabel=x, ylabel=y)
    axes.margins(0.15)
    _quiet(axes, both=True)
    return figure


def curves(table: pd.DataFrame, ylabel: str, logarithmic: bool = False) -> Figure:
    """A line for each column over the index."""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate(table):
        style = ("-", "--", ":")[i // len(COLOURS) % 3]
        colour = COLOURS[i % len(COLOURS)]
        axes.plot(table.index, table[name], style, marker="o", markersize=4, color=colour, label=name)
    axes.set(xlabel=table.index.name, ylabel=ylabel, xscale="log" if logarithmic else "linear")
    if logarithmic:
        axes.set_xticks(table.index, [f"{x:g}" for x in table.index])
        axes.minorticks_off()
    _quiet(axes, both=True)
    figure.legend(loc="outside right upper", fontsize="small", frameon=False)
    return figure


def _quiet(axes: Axes, both: bool = False) -> None:
    axes.grid(axis="both" if both else "x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
