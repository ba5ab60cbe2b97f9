"""DualPipe: microbatches enter a rank from both ends, so that a forward of one always has a backward of another beside
it (DeepSeek-V3, arXiv 2412.19437, section 3.2.1, figure 5; the published code, github.com/deepseek-ai/DualPipe, says
what the figure does in numbers).

    DualPipe    p ranks, two copies of each of p stages; half of the microbatches run from rank 0, half from rank p - 1
    DualPipeV   one half of that, unfolded: p ranks, 2 p stages in the form of a V, every microbatch goes there and back
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from research.parallel.pp.schedule import Placement, folded, mirrored
from research.train.action import Action, Entry, Kind, Overlap

Side = Literal[0, 1]  # the stage that microbatches of this rank's near end meet first, and the other


class Step(NamedTuple):
    """Some passes in a row, this often. `FB`: a forward of one side and a backward of the other that may overlap."""

    times: int
    passes: tuple[tuple[Literal["F", "B", "BW", "W", "FB"], Side], ...]


def steps(near: int, half: int, microbatches: int) -> Iterator[Step]:
    """What a rank does, `near` ranks from its end of a half of `half` ranks; each side runs all of `microbatches`."""
    yield Step(2 * (half - near - 1), (("F", 0),))
    yield Step(near + 1, (("F", 0), ("F", 1)))
    yield Step(half - near - 1, (("B", 1), ("W", 1), ("F", 1)))
    main = microbatches - 2 * half + near + 1
    middle = near == half - 1  # its first pair depends on each other's ranks too soon to overlap
    if middle:
        yield Step(1, (("F", 0), ("BW", 1), ("FB", 1)))
    yield Step(main - middle, (("FB", 0), ("FB", 1)))
    yield Step(half - near - 1, (("BW", 1), ("FB", 1)))
    together, odd = (near + 1) // 2, (near + 1) % 2  # of its last backwards, the second half put off their weights
    yield Step(together, (("BW", 1), ("BW", 0)))
    yield Step(odd, (("BW", 1), ("B", 0)))
    yield Step(together, (("B", 1), ("B", 0)))
    yield Step(half - near - 1, (("W", 0), ("B", 0)))
    yield Step(near + 1, (("W", 0),))


def one_list(near: int, half: int, microbatches: int, stages: tuple[int, int], first: tuple[int, int]) -> list[Entry]:
    """A rank's list: `stages` and number of the first microbatch of either side."""
    done: Counter[tuple[str, int]] = Counter()
    weights: deque[Action] = deque()  # run in the order in which they were put off, whatever their side

    def action(kind: Kind, side: int) -> Action:
        pass_ = "F" if kind == "F" else "B"
        made = Action(kind, stages[side], first[side] + done[pass_, side])
        done[pass_, side] += 1
        if kind == "B":
            weights.append(made._replace(kind="W"))
        return made

    entries: list[Entry] = []
    for step in steps(near, half, microbatches):
        for kind, side in step.passes * step.times:
            if kind == "W":
                entries.append(weights.popleft())
            elif kind == "FB":
                entries.append(Overlap(action("F", side), action("BW", 1 - side)))
            else:
                entries.append(action(kind, side))
    return entries


@dataclass(frozen=True)
class Bidirectional:
    """`copies` of each stage: 2 of DualPipe, 1 of DualPipeV."""

    copies: int
    per_rank: int = 2

    def holds(self, ranks: int, per_rank: int) -> Placement:
        return folded(ranks) if self.copies == 1 else mirrored(ranks)

    def suits(self, ranks: int, microbatches: int) -> int:
        """At least twice the ranks, and the same number from both ends."""
        return max(microbatches + microbatches % self.copies, 2 * ranks)

    def lists(self, ranks: int, per_rank: int, microbatches: int) -> Iterator[Sequence[Entry]]:
        half, each = ranks // self.copies, microbatches // self.copies
        for rank, (low, high) in enumerate(self.holds(ranks, per_rank)):
            if rank < half:
                yield one_list(rank, half, each, (low, high), (0, each * (self.copies - 1)))
            else:
                yield one_list(ranks - 1 - rank, half, each, (high, low), (each, 0))


DUALPIPE = Bidirectional(copies=2)
DUALPIPE_V = Bidirectional(copies=1)
