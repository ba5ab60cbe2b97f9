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
CATEGORIES = ("parameters", "master", "gradients", "optimizer", "activations", "communication")


def memory(rows: Iterable[Row], order: Sequence[str] | None = None) -> Figure:
    """Peak of the rank that needs most, MiB: a bar an arm, a piece a category. Raises ValueError without rows."""
    found = lines(rows, order)
    kinds = [*CATEGORIES, *sorted({c for line in found for c in line.rows[0].peak_bytes} - {*CATEGORIES})]
    return _stacked(found, lambda r: r.peak_bytes, kinds, "peak memory of a rank in a step (MiB)")


def traffic(rows: Iterable[Row], order: Sequence[str] | None = None) -> Figure:
    """What one rank receives in a step, MiB: a bar an arm, a piece an axis. Raises ValueError without rows."""
    found = lines(rows, order)
    axes = sorted({axis for line in found for axis in line.rows[0].comm_bytes})
    return _stacked(found, axis_bytes, axes, "received by a rank in a step (MiB)")


def axis_bytes(row: Row) -> dict[str, float]:
    """Bytes that one rank receives in a step, by axis."""
    return {axis: sum(labels.values()) for axis, labels in row.comm_bytes.items()}


def _stacked(
    found: Sequence[Line], of: Callable[[Row], Mapping[str, float]], pieces: Sequence[str], label: str
) -> Figure:
    """Mean over seeds. A piece that no line has is left out."""
    figure = Figure(figsize=(7.2, 1.5 + 0.36 * len(found)), layout="constrained")
    axes = figure.subplots()
    left = np.zeros(len(found))
    for i, piece in enumerate(pieces):
        sizes = np.array([line.mean(lambda r, p=piece: of(r).get(p, 0.0)) for line in found]) / MIB  # type: ignore[misc]
        if sizes.any():
            axes.barh(range(len(found)), sizes, left=left, color=COLOURS[i % len(COLOURS)], label=piece, height=0.7)
            left += sizes
    for place, total in enumerate(left):
        tip = (total, place)
        axes.annotate(f"{total:,.3g}", tip, (4, 0), textcoords="offset points", va="center", fontsize="small")
    axes.set(xlabel=label, yticks=range(len(found)), yticklabels=[line.name for line in found])
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.margins(x=0.12)
    _quiet(axes)
    if left.any():
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
