"""Timelines as pictures, and as text for a terminal."""

import io
from collections.abc import Iterator, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from research.parallel.pp.simulate import Timeline
from research.train.action import Action, Entry, Overlap, parts

# Okabe and Ito's palette; a rank's later stages are paler.
COLOURS = {"F": "#0072B2", "B": "#E69F00", "W": "#009E73", "BW": "#D55E00"}
NAMES = {"F": "F forward", "B": "B gradient of the input", "W": "W gradients of the weights", "BW": "BW both gradients"}
PALEST = 0.45  # opacity of a rank's last stage
LABELLED = 2000  # actions; more are too small to be told apart
FORMATS = ("svg", "png")


LEGEND = """\
F forward, B gradient of the input, W gradients of the weights, R both gradients, X an overlapped pair, told by its
forward; small letters: not the first stage of its rank; below, the last digit of the microbatch; . waiting"""


def picture(timelines: Sequence[Timeline], form: str) -> bytes:
    """`drawing` as an SVG or PNG."""
    out = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "schedules"}):
        drawing(timelines).savefig(out, format=form, metadata={"Date": None} if form == "svg" else None)
    return out.getvalue()


def drawing(timelines: Sequence[Timeline]) -> Figure:
    """Schedules below each other on one scale, a line a rank. Boxes carry the number of their microbatch, overlapped
    pairs a dark frame."""
    heights = [0.9 + 0.32 * max(t.schedule.ranks, 3) for t in timelines]
    figure = Figure(figsize=(12, 0.4 + sum(heights)), dpi=120, layout="constrained")
    panels = figure.subplots(len(timelines), squeeze=False, height_ratios=heights)[:, 0]
    longest = max(t.step for t in timelines)
    for axes, timeline in zip(panels, timelines, strict=True):
        _draw(axes, timeline)
        axes.set_xlim(0, longest)
    actions = [a for t in timelines for r in range(t.schedule.ranks) for a in t.schedule.flat(r)]
    kinds = sorted({a.kind for a in actions}, key=list(COLOURS).index)
    handles = [Patch(color=COLOURS[k], label=NAMES[k]) for k in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    return figure


def _draw(axes: Axes, timeline: Timeline) -> None:
    schedule = timeline.schedule
    labelled = sum(map(len, schedule.actions)) <= LABELLED
    for rank in range(schedule.ranks):
        _draw_rank(axes, timeline, rank, labelled)
    title = f"{schedule.name}: step {timeline.step:g}, bubble {timeline.bubble:.1%}"
    axes.set(ylim=(schedule.ranks - 0.5, -0.5), title=title)
    axes.set(yticks=range(schedule.ranks), yticklabels=[f"rank {r}" for r in range(schedule.ranks)])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)


def _boxes(timeline: Timeline, rank: int) -> Iterator[tuple[Action, float, float, float, float]]:
    """Action, start, width, bottom and height; the actions of an overlapped pair lie one above the other."""
    entries = timeline.schedule.actions[rank]
    for entry, start, end in zip(entries, timeline.starts[rank], timeline.ends[rank], strict=True):
        actions = parts(entry)
        for i, action in enumerate(actions):
            height = 0.9 / len(actions)
            yield action, start, end - start, rank - 0.45 + i * height, height


def _draw_rank(axes: Axes, timeline: Timeline, rank: int, labelled: bool) -> None:
    order = sorted(timeline.schedule.holds[rank])
    for action, start, width, bottom, height in _boxes(timeline, rank):
        pale = 1 - (1 - PALEST) * order.index(action.stage) / max(len(order) - 1, 1)
        frame = "black" if height < 0.9 else "white"
        at = [(start, width)], (bottom, height)
        axes.broken_barh(*at, facecolor=(COLOURS[action.kind], pale), edgecolor=frame, linewidth=0.4)
        if labelled:
            middle = start + width / 2, bottom + height / 2
            axes.text(*middle, str(action.microbatch), ha="center", va="center", fontsize=6 if height > 0.5 else 4)


def sketch(timeline: Timeline, width: int = 120, unit: float | None = None) -> str:
    """Two lines a rank, read by LEGEND; a column is `unit` of time."""
    unit = unit or unit_of(timeline)
    columns = max(round(timeline.step / unit), 1)
    lines = []
    for rank in range(timeline.schedule.ranks):
        kinds, numbers = _columns(timeline, rank, unit, columns)
        lines += [f"rank {rank:<3}{kinds[:width]}", f"{'':8}{numbers[:width]}".rstrip()]
    if columns > width:
        lines.append(f"{'':8}the first {width} of {columns} columns")
    return "\n".join(lines)


def unit_of(*timelines: Timeline) -> float:
    """What a column may stand for: the shortest time, or half of it where others are no multiples."""
    pairs = [pair for t in timelines for r in range(t.schedule.ranks) for pair in zip(*_times(t, r), strict=True)]
    lengths = {round(end - start, 9) for start, end in pairs if end > start}
    shortest = min(lengths, default=1.0)
    return shortest if all(abs(n / shortest - round(n / shortest)) < 1e-6 for n in lengths) else shortest / 2


def _times(timeline: Timeline, rank: int) -> tuple[Sequence[float], Sequence[float]]:
    return timeline.starts[rank], timeline.ends[rank]


def _columns(timeline: Timeline, rank: int, unit: float, columns: int) -> tuple[str, str]:
    kinds, numbers = ["."] * columns, [" "] * columns
    for entry, start, end in zip(timeline.schedule.actions[rank], *_times(timeline, rank), strict=True):
        first = parts(entry)[0]
        letter = _letter(entry)
        if first.stage != min(timeline.schedule.holds[rank]):
            letter = letter.lower()
        for column in range(round(start / unit), min(round(end / unit), columns)):
            kinds[column], numbers[column] = letter, str(first.microbatch % 10)
    return "".join(kinds), "".join(numbers)


def _letter(entry: Entry) -> str:
    if isinstance(entry, Overlap):
        return "X"
    return "R" if entry.kind == "BW" else entry.kind
