"""A schedule: one list of actions a rank, and which stages each rank holds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from research.train.action import Action, Entry, Overlap, parts

Placement = tuple[tuple[int, ...], ...]  # the stages of each rank


@dataclass(frozen=True)
class Schedule:
    """Rank r runs `actions[r]` in that order, and holds the stages `holds[r]`.

    A stage may be held by several ranks (DualPipe's copies): then a microbatch meets one of them, the rank in whose
    list it stands. Sends and receives are not listed: they follow from the dependencies (`check.needs`).
    """

    name: str
    stages: int
    microbatches: int
    holds: Placement
    actions: tuple[tuple[Entry, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.actions)

    def flat(self, rank: int) -> Iterator[Action]:
        """A rank's actions one by one, overlapped pairs taken apart."""
        for entry in self.actions[rank]:
            yield from parts(entry)


def restrict(schedule: Schedule, microbatches: int) -> Schedule:
    """The same schedule for the first few of its microbatches.

    Dependencies run within a microbatch, so what is left of a valid schedule is valid: that is how generators whose
    pattern wants more microbatches serve fewer.
    """

    def kept(entry: Entry) -> Iterator[Entry]:
        left = [a for a in parts(entry) if a.microbatch < microbatches]
        if isinstance(entry, Overlap) and len(left) == 2:
            yield entry
        else:
            yield from left

    actions = tuple(tuple(k for entry in entries for k in kept(entry)) for entries in schedule.actions)
    return Schedule(schedule.name, schedule.stages, microbatches, schedule.holds, actions)


def as_run(schedule: Schedule) -> Schedule:
    """The same schedule as ranks run it. Nobody waits for B of the first stage: with its W right behind, the two are
    one BW, which takes as long and makes weight gradients of what is still in the cache."""

    def joined(entries: Sequence[Entry]) -> tuple[Entry, ...]:
        result: list[Entry] = []
        for entry in entries:
            if isinstance(entry, Action) and entry[:2] == ("W", 0) and result[-1:] == [entry._replace(kind="B")]:
                result.pop()
                entry = entry._replace(kind="BW")
            result.append(entry)
        return tuple(result)

    return replace(schedule, actions=tuple(joined(entries) for entries in schedule.actions))


class Family(Protocol):
    """Schedules of one kind, told apart by its fields."""

    @property
    def per_rank(self) -> int | None:
        """Stages that a rank holds; None: as many as one likes."""
        ...

    @property
    def copies(self) -> int:
        """Ranks that hold each stage; the number of ranks must be a multiple of it."""
        ...

    def holds(self, ranks: int, per_rank: int) -> Placement:
        """Which stages each rank holds."""
        ...

    def suits(self, ranks: int, microbatches: int) -> int:
        """The least number of microbatches, from the given one on, that `lists` makes; the rest is left out again."""
        ...

    def lists(self, ranks: int, per_rank: int, microbatches: int) -> Iterator[Sequence[Entry]]:
        """What each rank runs."""
        ...


def round_robin(ranks: int, per_rank: int) -> Placement:
    """Rank r holds stages r, r + ranks, r + 2 ranks, ... (Narayanan et al. 2021, section 2.2)."""
    return tuple(tuple(range(rank, ranks * per_rank, ranks)) for rank in range(ranks))


def folded(ranks: int) -> Placement:
    """Two stages a rank in the form of a V: the first and the last stage share rank 0 (Qi et al. 2024, section 6)."""
    return tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))


def mirrored(ranks: int) -> Placement:
    """Two copies of each stage, on ranks r and ranks - 1 - r (DeepSeek-V3, section 3.2.1)."""
    return tuple((rank, ranks - 1 - rank) for rank in range(ranks))
