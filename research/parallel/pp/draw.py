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


def picture(timeline: Timeline, title: str, form: str) -> bytes:
    """An SVG or PNG with a line a rank; boxes carry the number of their microbatch, overlapped pairs a dark frame."""
    schedule = timeline.schedule
    figure = Figure(figsize=(12, 0.9 + 0.32 * max(schedule.ranks, 3)), dpi=120, layout="constrained")
    axes = figure.subplots()
    for rank in range(schedule.ranks):
        _draw_rank(axes, timeline, rank, len(list(_boxes(timeline, rank))) * schedule.ranks <= LABELLED)
    axes.set(xlim=(0, timeline.step), ylim=(schedule.ranks - 0.5, -0.5), title=title)
    axes.set(yticks=range(schedule.ranks), yticklabels=[f"rank {r}" for r in range(schedule.ranks)])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    kinds = dict.fromkeys(a.kind for r in range(schedule.ranks) for a in schedule.flat(r))
    handles = [Patch(color=COLOURS[k], label=NAMES[k]) for k in sorted(kinds, key=list(COLOURS).index)]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    out = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": schedule.name}):
        figure.savefig(out, format=form, metadata={"Date": None} if form == "svg" else None)
    return out.getvalue()


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


def sketch(timeline: Timeline, width: int = 120) -> str:
    """Two lines a rank: what it runs, and the last digit of the microbatch. A letter is small where the stage is not
    the rank's first; X is an overlapped pair, told by its forward; a dot is waiting."""
    lengths = [e - s for r in range(timeline.schedule.ranks) for s, e in zip(*_times(timeline, r), strict=True) if e > s]
    unit = min(lengths, default=1.0)
    columns = max(round(timeline.step / unit), 1)
    lines = []
    for rank in range(timeline.schedule.ranks):
        kinds, numbers = _columns(timeline, rank, unit, columns)
        lines += [f"rank {rank:<3}{kinds[:width]}", f"{'':8}{numbers[:width]}"]
    if columns > width:
        lines.append(f"{'':8}the first {width} of {columns} columns")
    return "\n".join(lines)


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
