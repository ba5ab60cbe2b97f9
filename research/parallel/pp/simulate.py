"""When each action of a schedule starts and ends, for given times; the bubble that follows."""

from collections.abc import Sequence
from dataclasses import dataclass

from research.parallel.pp.check import walk
from research.parallel.pp.schedule import Schedule
from research.train.action import Action, Entry, Overlap, made, parts


@dataclass(frozen=True)
class Times:
    """Of each stage on one microbatch, in any one unit. BW takes B and W together. `transfer[s]`: from stage s to s + 1
    and back; where both are on one rank it takes none. `overlap`: what an overlapped pair takes, as a share of its two
    actions one after the other."""

    forward: Sequence[float]
    backward: Sequence[float]  # B: the gradient of the input alone
    weight: Sequence[float]
    transfer: Sequence[float]
    overlap: float = 1.0

    def of(self, entry: Entry) -> float:
        if isinstance(entry, Overlap):
            return self.overlap * (self.of(entry.forward) + self.of(entry.backward))
        kind, stage, _ = entry
        if kind == "F":
            return self.forward[stage]
        return (self.backward[stage] if kind != "W" else 0.0) + (self.weight[stage] if kind != "B" else 0.0)


def even(schedule: Schedule, f: float, b: float, w: float, comm: float = 0.0, overlap: float = 1.0) -> Times:
    """`f`, `b`, `w` of 1/ranks of the model: a stage takes less where ranks hold several that differ. A transfer takes
    `comm` whatever the stage's size, which does not change what is sent."""
    share = schedule.ranks / schedule.stages
    n = schedule.stages
    return Times([f * share] * n, [b * share] * n, [w * share] * n, [comm] * (n - 1), overlap)


@dataclass(frozen=True)
class Timeline:
    """Start and end of every entry, by rank and place in its list; the first one starts at 0."""

    schedule: Schedule
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @property
    def step(self) -> float:
        """From the first start to the last end of any rank."""
        return max(ends[-1] for ends in self.ends if ends)

    def busy(self, rank: int) -> float:
        return sum(end - start for start, end in zip(self.starts[rank], self.ends[rank], strict=True))

    def span(self, rank: int) -> float:
        """From a rank's own first start to its own last end."""
        return self.ends[rank][-1] - self.starts[rank][0] if self.ends[rank] else 0.0

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in which they wait, if all wait for the last to end."""
        return 1 - sum(map(self.busy, range(self.schedule.ranks))) / (self.schedule.ranks * self.step)

    @property
    def bubble_alone(self) -> float:
        """The same of the rank that takes longest from its first action to its last, as Zero Bubble counts it: its
        optimizer steps do not wait for each other (Qi et al. 2024, section 4)."""
        rank = max(range(self.schedule.ranks), key=self.span)
        return 1 - self.busy(rank) / self.span(rank)


def simulate(schedule: Schedule, times: Times) -> Timeline:
    """Each entry starts when its rank is free and all it needs has arrived. Transfers run beside the computation and do
    not slow each other down. Raises ScheduleError if ranks wait for each other."""
    arrived: dict[Action, tuple[float, int]] = {}  # what was made -> when, and by which rank
    starts: list[list[float]] = [[] for _ in range(schedule.ranks)]
    ends: list[list[float]] = [[] for _ in range(schedule.ranks)]
    transfer = times.transfer
    for rank, entry, needed in walk(schedule):
        start = ends[rank][-1] if ends[rank] else 0.0
        for need in needed:
            end, maker = arrived[need]
            if maker != rank:  # an activation goes up by one stage, a gradient down
                end += transfer[need.stage if need.kind == "F" else need.stage - 1]
            start = max(start, end)
        end = start + times.of(entry)
        starts[rank].append(start)
        ends[rank].append(end)
        for action in parts(entry):
            arrived[made(action)] = end, rank
    return Timeline(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)))
