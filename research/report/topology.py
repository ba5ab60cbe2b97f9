"""Who is where: the ranks of a world in both views, the groups along every axis, and the boxes that ranks hold.

No rank is started: under the fake process group one process stands for each of them in turn.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from research.launch.process import fake_process_group
from research.mesh import DENSE, EXPERT, Box, Layout, Mesh
from research.report.figures import COLOURS

AXES = ("pp", "dp", "cp", "tp", "edp", "ep", "etp")
MEANINGS = {
    "pp": "stages of layers",
    "dp": "rows of the batch",
    "cp": "tokens of a sample",
    "tp": "heads, width, vocabulary",
    "edp": "copies of an expert",
    "ep": "experts",
    "etp": "width of an expert",
}
FILLS = (*COLOURS, "#F0E442", "#999999")  # told apart up to eight groups; then they come again


def meshes(sizes: Mapping[str, int]) -> Iterator[Mesh]:
    """The mesh of every rank in turn; its groups can be asked for until the next one comes."""
    world = Mesh(sizes).world
    for rank in range(world):
        with fake_process_group(world, rank):
            yield Mesh(sizes, rank, fake=True)


def places(sizes: Mapping[str, int]) -> pd.DataFrame:
    """Coordinates of every rank, a line each: the dense view, then the expert view of the same ranks."""
    mesh = Mesh(sizes)
    columns = pd.MultiIndex.from_tuples([*(("dense", a) for a in DENSE), *(("expert", a) for a in EXPERT)])
    found = [mesh.coordinates(rank) for rank in range(mesh.world)]
    data = [[at[axis] for _, axis in columns] for at in found]
    return pd.DataFrame(data, columns=columns, index=pd.RangeIndex(mesh.world, name="rank"))


def members(sizes: Mapping[str, int], axis: str) -> list[tuple[int, ...]]:
    """The groups along an axis, each as its ranks in order."""
    return sorted({mesh.group(axis).ranks for mesh in meshes(sizes)})


def groups(sizes: Mapping[str, int], axes: Sequence[str] = AXES) -> pd.DataFrame:
    """A line for each axis: what it cuts, how many ranks a group along it has, how many groups there are, and those in
    which the ranks of stage 0 are."""
    found = {axis: members(sizes, axis) for axis in axes}
    stage = Mesh(sizes).stage_ranks
    columns = {
        "cuts": [MEANINGS[axis] for axis in axes],
        "degree": [len(ranks[0]) for ranks in found.values()],
        "groups": [len(ranks) for ranks in found.values()],
        "those of stage 0": [" | ".join(_text(r) for r in ranks if r[0] < stage) for ranks in found.values()],
    }
    return pd.DataFrame(columns, index=pd.Index(axes, name="axis"))


def holdings(sizes: Mapping[str, int], layout: Layout) -> pd.DataFrame:
    """A line for each rank: the box that it holds of a tensor, and the ranks over which its gradient is summed, with
    the axes along which these copies lie."""
    data = []
    for mesh in meshes(sizes):
        copies = mesh.replicas(layout)
        shared = (_text(copies.ranks), copies.axis) if copies.size > 1 else ("–", "–")
        data.append((_slices(layout.box(mesh.at)), *shared))
    columns = [f"holds [{', '.join(layout.dims)}]", "gradient summed over", "along"]
    return pd.DataFrame(data, columns=columns, index=pd.RangeIndex(len(data), name="rank"))


def picture(sizes: Mapping[str, int], axes: Sequence[str] = AXES[1:]) -> Figure:
    """A panel for each axis. A line of boxes is a pipeline stage, a box is a rank; ranks of one colour share a group of
    that axis, those that are alone have none."""
    columns = min(len(axes), 3)
    mesh = Mesh(sizes)
    width, height = 0.42 * mesh.stage_ranks + 0.8, 0.45 * mesh.sizes["pp"] + 0.6
    lines = math.ceil(len(axes) / columns)
    figure = Figure(figsize=(width * columns, height * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flat
    for axis, panel in zip(axes, panels, strict=False):  # takes no panel beyond the last axis
        _draw(panel, mesh, members(sizes, axis))
        panel.set_title(f"{axis} = {mesh.sizes[axis]}: {MEANINGS[axis]}", fontsize=9)
    for panel in panels:
        panel.set_axis_off()
    return figure


def _draw(axes: Axes, mesh: Mesh, found: Sequence[Sequence[int]]) -> None:
    for number, ranks in enumerate(found):
        fill = FILLS[number % len(FILLS)] if len(ranks) > 1 else "white"
        for rank in ranks:
            stage, place = divmod(rank, mesh.stage_ranks)
            corner = place + 0.05, stage + 0.05
            axes.add_patch(Rectangle(corner, 0.9, 0.9, facecolor=fill, edgecolor="grey", alpha=0.75))
            axes.text(place + 0.5, stage + 0.5, str(rank), ha="center", va="center", fontsize=8)
    axes.set(xlim=(0, mesh.stage_ranks), ylim=(mesh.sizes["pp"], 0), xticks=[], aspect="equal")
    axes.set_yticks([stage + 0.5 for stage in range(mesh.sizes["pp"])], [f"pp {s}" for s in range(mesh.sizes["pp"])])
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)


def _text(ranks: Sequence[int]) -> str:
    return " ".join(map(str, ranks))


def _slices(box: Box) -> str:
    return ", ".join(f"{low}:{low + size}" for low, size in box)
