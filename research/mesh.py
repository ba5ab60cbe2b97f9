"""The only topology: which rank stands where, who shares a group, which box of a tensor a rank holds.

Two views of the same ranks. Dense: (pp, dp, cp, tp), tp fastest. Expert: (pp, edp, ep, etp), etp fastest; inside a
stage edp * ep * etp = dp * cp * tp, so the expert axes fold over all dense ones.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from research.config import RunConfig, degrees
from research.ledger import Ledger

DENSE = ("pp", "dp", "cp", "tp")
EXPERT = ("pp", "edp", "ep", "etp")

Box = tuple[tuple[int, int], ...]  # (offset, size) for each dim of a global tensor
Coordinates = Mapping[str, int]


@dataclass(frozen=True)
class Group:
    """The ranks that share one process group, and the axis that it serves (the label of its traffic)."""

    axis: str
    ranks: tuple[int, ...]
    rank: int  # position of this process in `ranks`
    ledger: Ledger
    process_group: dist.ProcessGroup | None = None  # None for a group of one

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Layout:
    """How one named global tensor is cut. Dim i has units[i] * unit[i] elements and is cut between units only;
    split[i] names the mesh axis and the degree that cut it, or None."""

    dims: tuple[str, ...]
    units: tuple[int, ...]
    unit: tuple[int, ...]
    split: tuple[tuple[str, int] | None, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(n * u for n, u in zip(self.units, self.unit, strict=True))

    def box(self, at: Coordinates) -> Box:
        """What the rank at these coordinates holds. Fewer units than ranks: neighbours hold copies of one unit."""
        box = []
        for units, unit, split in zip(self.units, self.unit, self.split, strict=True):
            low, high = 0, units
            if split is not None:
                axis, degree = split
                if units < degree:
                    low = at[axis] * units // degree
                    high = low + 1
                else:
                    each = -(-units // degree)
                    low, high = min(at[axis] * each, units), min((at[axis] + 1) * each, units)
            box.append((low * unit, (high - low) * unit))
        return tuple(box)

    def local_shape(self) -> tuple[int, ...]:
        """The shape of the local tensor: the largest box, so that the last rank pads where units do not divide."""
        return tuple(
            units * unit if split is None else -(-units // split[1]) * unit
            for units, unit, split in zip(self.units, self.unit, self.split, strict=True)
        )


class Mesh:
    """`sizes` holds pp, dp, cp, tp, edp, ep, etp; `at` the coordinates of this rank on each of them.

    Making a group is collective: every rank must ask for the same groups in the same order. With `fake`, groups are
    made for this rank alone, under the fake process group, so that one process can stand for any rank of any world.
    """

    def __init__(self, sizes: Mapping[str, int], rank: int = 0, fake: bool = False, timeout_s: float = 300.0) -> None:
        full = {axis: sizes.get(axis, 1) for axis in ("pp", "dp", "cp", "tp", "ep", "etp")}
        self.stage_ranks = full["dp"] * full["cp"] * full["tp"]
        folded = full["ep"] * full["etp"]
        if self.stage_ranks % folded:
            raise ValueError(f"ep*etp={folded} must divide dp*cp*tp={self.stage_ranks}")
        self.sizes = full | {"edp": self.stage_ranks // folded}
        self.world = self.stage_ranks * full["pp"]
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is not in a world of {self.world}")
        self.rank = rank
        self.at = self.coordinates(rank)
        self.ledger = Ledger()
        self._fake = fake
        self._timeout = timedelta(seconds=timeout_s)
        self._made: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup | None] = {}
        self._partitions: dict[Hashable, tuple[int, ...]] = {}
        self._labels: dict[tuple[int, ...], str] = {}

    @classmethod
    def from_config(cls, config: RunConfig, world: int, rank: int, fake: bool = False) -> "Mesh":
        mesh = cls(degrees(config), rank, fake, config.launch.backend_timeout_s)
        if mesh.world != world:
            raise ValueError(f"the degrees make {mesh.world} ranks, the world has {world}")
        return mesh

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of any rank on every axis of both views."""
        at = {}
        for view in (DENSE, EXPERT):
            left = rank
            for axis in reversed(view):
                left, at[axis] = divmod(left, self.sizes[axis])
        return at

    def group(self, axis: str) -> Group:
        """This rank's group along an axis, or of its `stage`, or of the whole `world`; `sample`: the ranks of a stage
        that hold parts, or copies, of the same samples; `experts`: those that together hold each expert once, ep by
        ep and for each the ranks of etp."""
        if axis == "world":
            return self._partition(axis, axis, lambda at: ())
        if axis == "stage":
            return self._partition(axis, axis, lambda at: at["pp"])
        if axis == "sample":
            return self._partition(axis, axis, lambda at: (at["pp"], at["dp"]))
        if axis == "experts":
            return self._partition("ep", axis, lambda at: (at["pp"], at["edp"]))
        view = DENSE if axis in DENSE else EXPERT
        others = [a for a in view if a != axis]
        return self._partition(axis, axis, lambda at: tuple(at[a] for a in others))

    def nested(self, axis: str, inner: int) -> tuple[Group, Group]:
        """A dense axis as two: this rank's group of `inner` neighbours, and its group of those at the same place among
        theirs."""
        others = [a for a in DENSE if a != axis]

        def part(which: int) -> Group:
            return self._partition(
                axis, (axis, inner, which), lambda at: (*(at[a] for a in others), divmod(at[axis], inner)[which])
            )

        return part(0), part(1)

    def replicas(self, layout: Layout) -> Group:
        """The ranks of this stage that hold the same box: a gradient is summed over them. They get groups of their own,
        so that sums of gradients do not queue with other collectives of the same ranks. The label names the dense axes
        along which copies lie: "dp", "dp*cp", ..
        """
        return self._labelled(self._partition("", layout, lambda at: (at["pp"], layout.box(at))))

    def shards(self, layout: Layout, parts: int, use: str = "") -> Group:
        """Those of `replicas(layout)` on the same one of as many `parts` of the dp axis: a box is cut once more over
        them. Each `use` has groups of its own, so that what is sent for it does not queue with the rest."""
        part = self.sizes["dp"] // parts
        group = self._partition(
            use, ("shards", use, parts, layout), lambda at: (at["pp"], layout.box(at), at["dp"] // part)
        )
        return self._labelled(group)

    def shard_copies(self, layout: Layout, parts: int) -> Group:
        """Those that hold the same cut of a box, one on each of the `parts` of the dp axis."""
        part = self.sizes["dp"] // parts
        places: dict[Hashable, int] = {}  # ranks met so far, by box and part

        def color(at: Coordinates) -> Hashable:
            inside = at["pp"], layout.box(at), at["dp"] // part
            places[inside] = places.get(inside, -1) + 1
            return *inside[:2], places[inside]

        return self._labelled(self._partition("", ("copies", parts, layout), color))

    def _labelled(self, group: Group) -> Group:
        if group.ranks not in self._labels:
            places = [self.coordinates(r) for r in group.ranks]
            along = [axis for axis in DENSE if len({at[axis] for at in places}) > 1]
            self._labels[group.ranks] = "*".join(along) or "dp"
        return dataclasses.replace(group, axis=self._labels[group.ranks])

    def holders(self, stages: tuple[int, ...]) -> Group:
        """The ranks at this rank's place in each of these pp coordinates, which hold copies of a parameter; this rank
        alone where its stage is none of them."""
        return dataclasses.replace(self._across("copies", stages), axis="pp")

    def way(self, sender: int, receiver: int) -> Group:
        """From one pp coordinate to another, at this rank's place in both; this rank alone where it is neither.

        Each direction has a group of its own, so that the two never wait for each other and messages arrive in the
        order of the sender, without tags, which NCCL does not know.
        """
        made = len(self._made)
        group = self._across(f"{sender}>{receiver}", (sender, receiver))
        ranks = group.ranks if sender < receiver else group.ranks[::-1]
        way = dataclasses.replace(group, axis="pp", ranks=ranks, rank=ranks.index(self.rank))
        if len(self._made) > made:
            connect(way)
        return way

    def _across(self, axis: str, stages: tuple[int, ...]) -> Group:
        def color(at: Coordinates) -> Hashable:
            return tuple(at[a] for a in DENSE if a != "pp" or at["pp"] not in stages)

        return self._partition(axis, (axis, stages), color)

    def _partition(self, axis: str, name: Hashable, color: Callable[[Coordinates], Hashable]) -> Group:
        """Ranks of one color share a group; ranks that meet again for the same axis share it again."""
        if name not in self._partitions:
            classes: dict[Hashable, list[int]] = {}
            colors = [color(self.coordinates(rank)) for rank in range(self.world)]
            for rank, of_rank in enumerate(colors):
                classes.setdefault(of_rank, []).append(rank)
            mine = tuple(classes[colors[self.rank]])
            for ranks in [mine] if self._fake else map(tuple, classes.values()):
                if (axis, ranks) not in self._made:
                    self._made[axis, ranks] = self._new_group(axis, ranks)
            self._partitions[name] = mine
        mine = self._partitions[name]
        return Group(axis, mine, mine.index(self.rank), self.ledger, self._made[axis, mine])

    def _new_group(self, axis: str, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        if len(ranks) == 1:
            return None
        if axis == "world":
            return dist.group.WORLD
        return dist.new_group(list(ranks), timeout=self._timeout)


def connect(way: Group) -> None:
    """Send one number along a new way. With NCCL two ranks wait for each other at their first message, even where the
    group is bound to a device: a receive that is posted early could wait for ever, as its sender may be at such a
    receive itself. All ranks make the same ways in the same order, so that here none waits in a circle."""
    group = way.process_group
    if group is None:
        return
    number = torch.zeros(1, device=group.bound_device_id)
    if way.rank == 0:
        dist.send(number, way.ranks[1], group)
    else:
        dist.recv(number, way.ranks[0], group)


def total_ranks(config: RunConfig) -> int:
    """Ranks that the degrees of a config need."""
    return math.prod(degrees(config)[axis] for axis in DENSE)
