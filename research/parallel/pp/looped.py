"""Schedules in which each rank runs some forwards, then one forward and one backward in turn, then backwards.

GPipe, 1F1B, interleaved 1F1B, breadth-first, ZB-H1, ZB-H2 and interleaved zero bubble differ in three numbers only: how
many forwards come first, in which order stages take their turns, and how long weight gradients wait.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from research.parallel.pp.schedule import Placement, round_robin
from research.train.action import Action, Entry

Pass = tuple[int, int]  # (stage, microbatch)


@dataclass(frozen=True)
class Loop:
    """`hop`: forwards that a rank runs first, for each rank behind it; None: all of them. `late`: backwards that a W
    waits for, times the rank; None: not split off. `breadth`: a stage runs all microbatches before the next stage."""

    hop: int | None
    late: int | None = None
    breadth: bool = False
    per_rank: int | None = 1
    copies: int = 1

    def holds(self, ranks: int, per_rank: int) -> Placement:
        return round_robin(ranks, per_rank)

    def suits(self, ranks: int, microbatches: int) -> int:
        """So many that they fall into equal groups, where stages of a rank take turns by groups."""
        if self.per_rank == 1 or self.breadth:
            return microbatches
        return next(m for m in range(microbatches, microbatches + ranks) if m % max(1, m // ranks) == 0)

    def lists(self, ranks: int, per_rank: int, microbatches: int) -> Iterator[Sequence[Entry]]:
        group = microbatches if self.per_rank == 1 or self.breadth else group_of(ranks, microbatches)
        for rank, stages in enumerate(self.holds(ranks, per_rank)):
            forwards = _turns(stages, microbatches, group)
            backwards = _turns(stages[::-1], microbatches, group, last_first=self.breadth)
            first = len(forwards)
            if self.hop is not None:
                first = min(first, (per_rank - 1) * group + self.hop * (ranks - 1 - rank))
            yield one_by_one(forwards, backwards, first, None if self.late is None else self.late * rank)


GPIPE = Loop(hop=None)  # Huang et al. 2019, section 2.3
ONE_F_ONE_B = Loop(hop=1)  # Narayanan et al. 2021, section 2.2.1
INTERLEAVED = Loop(hop=2, per_rank=None)  # Narayanan et al. 2021, section 2.2.2
LOOPED_BFS = Loop(hop=None, breadth=True, per_rank=None)  # Lamy-Poirier 2022, arXiv 2211.05953
ZB_H1 = Loop(hop=1, late=1)  # Qi et al. 2024, arXiv 2401.10241, section 2.2
ZB_H2 = Loop(hop=2, late=2)  # section 2.3
INTERLEAVED_ZB = Loop(hop=1, late=1, per_rank=None)


def group_of(ranks: int, microbatches: int) -> int:
    """Microbatches that a stage runs before the rank's next stage has its turn: the number of ranks, or as few more as
    make the groups equal. Narayanan et al. 2021 want a multiple of the ranks."""
    return microbatches // max(1, microbatches // ranks)


def _turns(stages: Sequence[int], microbatches: int, group: int, last_first: bool = False) -> list[Pass]:
    step = -1 if last_first else 1
    return [
        (stage, m)
        for start in range(0, microbatches, group)
        for stage in stages
        for m in range(start, start + group)[::step]
    ]


def one_by_one(forwards: Sequence[Pass], backwards: Sequence[Pass], first: int, late: int | None) -> list[Action]:
    """`first` forwards, then a forward before each backward, while there are any; W after `late` more backwards."""
    actions = [Action("F", *f) for f in forwards[:first]]
    for i, b in enumerate(backwards):
        actions += [Action("F", *f) for f in forwards[first + i : first + i + 1]]
        if late is None:
            actions.append(Action("BW", *b))
        else:
            actions.append(Action("B", *b))
            actions += [Action("W", *w) for w in backwards[i - late : i - late + 1] if i >= late]
    if late:
        actions += [Action("W", *w) for w in backwards[max(len(backwards) - late, 0) :]]
    return actions
