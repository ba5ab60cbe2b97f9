"""Figures of rows: loss curves, throughput, balance of experts. Made without pyplot, so that nothing global changes."""

import io
import math
import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from research.files import write_atomically
from research.record import Row
from research.report.facts import has_experts, max_violation
from research.report.lines import Line, lines, ratio

# Okabe and Ito's palette, which the colour-blind can tell apart; black is left to text and references.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
STROKES: tuple[str | tuple[int, tuple[float, ...]], ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
SAME = 0.005  # share of the plotted range that the eye cannot tell from nothing


def overview(
    rows: Iterable[Row], path: Path, order: Sequence[str] | None = None, title: str = "", baseline: str = ""
) -> None:
    """Write a PNG with loss curves and throughput side by side, which is over that of arm `baseline`, else the first;
    beside them MaxVio, where any row has experts. Raises ValueError where there are no rows."""
    found = lines(rows, order)
    panels = 3 if has_experts(r for line in found for r in line.rows) else 2
    size = 4 * panels + 4, max(4.6, 1.6 + 0.4 * len(found))
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    left, middle, *right = figure.subplots(1, panels, width_ratios=(3, 2, 1.5)[:panels])
    _draw_losses(left, found)
    _draw_throughput(middle, found, baseline or (order[0] if order else found[0].arm))
    for axes in right:
        _draw_violations(axes, found)
    figure.suptitle(title)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_atomically(path, buffer.getvalue())


def losses(rows: Iterable[Row], order: Sequence[str] | None = None) -> Figure:
    """Loss in nats per token over optimizer steps, a line an arm. Raises ValueError where there are no rows."""
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    _draw_losses(figure.subplots(), lines(rows, order))
    return figure


def throughput(rows: Iterable[Row], order: Sequence[str] | None = None) -> Figure:
    """Tokens per second, a bar an arm. Raises ValueError where there are no rows."""
    found = lines(rows, order)
    figure = Figure(figsize=(7.2, 1.4 + 0.4 * len(found)), layout="constrained")
    _draw_throughput(figure.subplots(), found, order[0] if order else found[0].arm)
    return figure


def _draw_losses(axes: Axes, found: Sequence[Line]) -> None:
    for i, line in enumerate(found):
        curve = _over_seeds(line, statistics.fmean)
        if not curve:
            continue
        steps = range(1, len(curve) + 1)
        # Early curves are wide and late ones narrow, so that each stays visible where they coincide.
        width = 1.5 + 4 * (1 - (i + 1) / len(found))
        stroke, marker = STROKES[i % len(STROKES)], "o" if len(curve) == 1 else None
        axes.plot(steps, curve, color=_colour(i), linestyle=stroke, linewidth=width, marker=marker, label=_name(line))
        if len(line.rows) > 1:
            axes.fill_between(steps, _over_seeds(line, min), _over_seeds(line, max), color=_colour(i), alpha=0.2)
    for entropy in sorted({line.rows[0].unigram_entropy for line in found}):
        axes.axhline(entropy, color="black", linestyle="--", linewidth=1, label=f"unigram entropy {entropy:.3f}")
    axes.set(xlabel="optimizer step", ylabel="cross-entropy loss (nats per token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", handlelength=4, title=_overlaps(found), title_fontsize="small", alignment="left")


def _draw_throughput(axes: Axes, found: Sequence[Line], baseline: str) -> None:
    def told(line: Line, rate: float) -> str:
        times = ratio(line, baseline, found)
        return f"{rate:,.0f}" + ("" if times is None else f"  ({times:.2f}×)")

    _draw_bars(axes, found, lambda r: r.tokens_per_s, told)
    axes.set(xlabel=f"tokens/s  (× {baseline})")
    axes.xaxis.set_major_formatter("{x:,.0f}")


def _draw_violations(axes: Axes, found: Sequence[Line]) -> None:
    def told(line: Line, violation: float) -> str:
        return f"{violation:.2f}" if has_experts(line.rows) else "–"

    _draw_bars(axes, found, lambda r: max_violation(r) if r.max_violation else 0.0, told)
    axes.set(xlabel="MaxVio: busiest expert over the mean, less 1")


def _draw_bars(
    axes: Axes, found: Sequence[Line], of: Callable[[Row], float], told: Callable[[Line, float], str]
) -> None:
    """A bar for each line, and beside it what is told of its mean."""
    for i, line in enumerate(found):
        mean, spread = line.mean(of), line.spread(of)
        hatch = None if line.kind == "measured" else "///"
        axes.barh(i, mean, xerr=spread, color=_colour(i), edgecolor="white", hatch=hatch, capsize=3)
        tip = (mean + (spread or 0), i)
        axes.annotate(told(line, mean), tip, (5, 0), textcoords="offset points", va="center", fontsize="small")
    axes.set(yticks=range(len(found)), yticklabels=[_name(line) for line in found])
    axes.locator_params(axis="x", nbins=4)
    axes.margins(x=0.35)
    axes.set_xlim(left=0)
    axes.set_ylim(max(len(found), 3) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _name(line: Line) -> str:
    return line.name if line.kind == "measured" else f"{line.name}, {line.kind}"


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _over_seeds(line: Line, of: Callable[[Sequence[float]], float]) -> list[float]:
    """One value a step, as far as the runs of all seeds went."""
    return [of(step) for step in zip(*(r.losses for r in line.rows), strict=False)]


def _overlaps(found: Sequence[Line]) -> str:
    """Which curves lie on each other, and how far apart they are at most."""
    curves = {_name(line): curve for line in found if (curve := _over_seeds(line, statistics.fmean))}
    finite = [x for curve in curves.values() for x in curve if math.isfinite(x)]
    if not finite:
        return "no loss recorded"
    limit = SAME * (max(finite) - min(finite))
    groups: list[list[str]] = []
    for name, curve in curves.items():
        for group in groups:
            first = curves[group[0]]
            if len(curve) == len(first) and all(abs(x - y) <= limit for x, y in zip(curve, first, strict=True)):
                group.append(name)
                break
        else:
            groups.append([name])
    notes = []
    for group in groups:
        gap = max(max(step) - min(step) for step in zip(*(curves[n] for n in group), strict=True))
        notes += [f"overlapping, at most {gap:.1g} nats apart: {', '.join(group)}"] if len(group) > 1 else []
    return "\n".join(textwrap.fill(note, 56) for note in notes)
