"""Two or more implementations of one computation, timed side by side in one run.

Machines are noisy, so what counts is a ratio: sides take turns, each repetition gives one ratio, the median counts. And
no time is told of what was not shown to be equal: a fast wrong answer is easy.
"""

import os
import resource
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

import torch
from torch import Tensor

from research.config import LaunchConfig
from research.launch.local import start_each
from research.launch.process import Place

PLAIN = ", torch's products"  # after the name of a side
Values = Mapping[str, Tensor]  # losses, outputs, gradients: whatever must agree, by name


class NotEqualError(ValueError):
    """The sides of a case do not compute the same."""


@dataclass(frozen=True)
class Side:
    name: str
    run: Callable[[], Values]  # one repetition: what is timed, and what it came to


def by_torch(side: Side) -> Side:
    """The same side with torch's own products (`models/products.py`): how much of a ratio is that of products."""

    def run() -> Values:
        enabled, *_ = torch.backends.mkldnn.set_flags(False)
        try:
            return side.run()
        finally:
            torch.backends.mkldnn.set_flags(enabled)

    return Side(side.name + PLAIN, run)


@dataclass(frozen=True)
class Case:
    """One comparison in this process: `ours` over each of `others`."""

    name: str
    threads: int  # CPU threads of this process
    tolerance: float  # relative error, ||a - b|| / ||b||, of each value
    ours: Side
    others: Sequence[Side]

    @property
    def sides(self) -> list[Side]:
        return [self.ours, *self.others]


@dataclass(frozen=True)
class RankedSide:
    """A side that takes several ranks, each a process of this machine that knows no other side: what one keeps in its
    heap does not slow another down."""

    name: str
    make: Callable[[Place, torch.device], Callable[[], Values]]  # a rank's part of it

    def by_torch(self) -> "RankedSide":
        """The same with torch's own products."""

        def make(place: Place, device: torch.device) -> Callable[[], Values]:
            return by_torch(Side(self.name, self.make(place, device))).run

        return RankedSide(self.name + PLAIN, make)


@dataclass(frozen=True)
class RankedCase:
    """A comparison of sides of so many ranks each. One side runs at a time."""

    name: str
    ranks: int
    launch: LaunchConfig
    tolerance: float
    ours: RankedSide
    others: Sequence[RankedSide]

    @property
    def threads(self) -> int:
        """One a rank."""
        return self.ranks

    @property
    def sides(self) -> list[RankedSide]:
        return [self.ours, *self.others]


@dataclass(frozen=True)
class Quartiles:
    low: float
    median: float
    high: float


@dataclass(frozen=True)
class Result:
    """Ours over one other side; times are medians of a repetition."""

    case: str
    threads: int
    other: str
    repetitions: int
    error: float  # the largest relative error between the two
    ours_cpu_ms: float
    other_cpu_ms: float
    cpu_ratio: Quartiles
    wall_ratio: Quartiles


Seconds = tuple[float, float]  # CPU, wall


@dataclass(frozen=True)
class Taken:
    """What was measured of one side."""

    values: Values  # of its first run, which is not timed
    seconds: Sequence[Seconds]  # of each repetition


def compare(case: Case | RankedCase, repetitions: int, progress: Callable[[], None] = lambda: None) -> list[Result]:
    """Time in turns. Raises NotEqualError for sides that do not compute the same: in one process before they are timed,
    of ranks afterwards."""
    others = [side.name for side in case.others]
    if isinstance(case, Case):
        errors = gate(case)
        ours, *theirs = _here(case, repetitions, progress)
    else:
        mine, *rest = _on_ranks(case, repetitions, progress)
        errors = [
            max(agree(case, other, a.values, b.values) for a, b in zip(mine, ranks, strict=True))
            for other, ranks in zip(others, rest, strict=True)
        ]
        ours, *theirs = (together([taken.seconds for taken in ranks]) for ranks in (mine, *rest))
    return [_result(case, *of_other, ours=ours) for of_other in zip(others, errors, theirs, strict=True)]


def gate(case: Case) -> list[float]:
    """The largest relative error of each other side."""
    torch.set_num_threads(case.threads)
    ours = case.ours.run()
    return [agree(case, other.name, ours, other.run()) for other in case.others]


def agree(case: Case | RankedCase, other: str, ours: Values, theirs: Values) -> float:
    """The largest relative error of any value. Raises NotEqualError past the tolerance."""
    if set(ours) != set(theirs):
        names = ", ".join(sorted(set(ours) ^ set(theirs)))
        raise NotEqualError(f"{case.name}: {case.ours.name} and {other} do not both have {names}")
    worst = max(ours, key=lambda name: _error(ours[name], theirs[name]))
    error = _error(ours[worst], theirs[worst])
    if not error <= case.tolerance:
        raise NotEqualError(
            f"{case.name}: {worst} of {case.ours.name} and {other} differ by {error:.1e}, "
            f"tolerance {case.tolerance:g}: their times say nothing"
        )
    return error


def turns(sides: int, repetitions: int) -> Iterator[int]:
    """Whose turn it is. The order reverses with each repetition, so that no side always runs on warm caches."""
    for repetition in range(repetitions):
        yield from range(sides) if repetition % 2 else reversed(range(sides))


def _here(case: Case, repetitions: int, progress: Callable[[], None]) -> list[list[Seconds]]:
    seconds: list[list[Seconds]] = [[] for _ in case.sides]
    for side in turns(len(seconds), repetitions):
        seconds[side].append(_timed(case.sides[side].run))
        if side == 0:
            progress()
    return seconds


def _on_ranks(case: RankedCase, repetitions: int, progress: Callable[[], None]) -> list[list[Taken]]:
    """Of each side what each of its ranks took."""
    meeting = get_context("fork").Barrier(len(case.sides) * case.ranks)
    told, tell = os.pipe()

    def body(mine: int, place: Place, device: torch.device) -> Taken:
        run = case.sides[mine].make(place, device)
        values, seconds = run(), []
        for side in turns(len(case.sides), repetitions):
            meeting.wait()
            if side == mine:
                seconds.append(_timed(run))
                if mine == place.rank == 0:
                    os.write(tell, b".")
        return Taken(values, seconds)

    def watch() -> None:
        while os.read(told, 1):
            progress()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        return start_each([partial(body, side) for side in range(len(case.sides))], case.ranks, case.launch)
    finally:
        os.close(tell)
        watcher.join()
        os.close(told)


def together(ranks: Sequence[Sequence[Seconds]]) -> list[Seconds]:
    """CPU time of all ranks, wall time of the slowest."""
    return [(sum(cpu for cpu, _ in times), max(wall for _, wall in times)) for times in zip(*ranks, strict=True)]


def cpu_s() -> float:
    """CPU seconds of all threads of this process and of all its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def _timed(run: Callable[[], Values]) -> Seconds:
    cpu, wall = cpu_s(), time.perf_counter()
    run()
    return cpu_s() - cpu, time.perf_counter() - wall


def _error(a: Tensor, b: Tensor) -> float:
    """Not finite where either is not, so that nothing passes for equal that is no number."""
    size = b.double().norm()
    return float((a.double() - b.double()).norm() / size) if size else float(a.double().norm())


def _result(
    case: Case | RankedCase, other: str, error: float, theirs: Sequence[Seconds], ours: Sequence[Seconds]
) -> Result:
    cpu, wall = ([a[i] / b[i] for a, b in zip(ours, theirs, strict=True)] for i in (0, 1))
    ours_ms, other_ms = (1e3 * statistics.median(t[0] for t in side) for side in (ours, theirs))
    ratios = _quartiles(cpu), _quartiles(wall)
    return Result(case.name, case.threads, other, len(ours), error, ours_ms, other_ms, *ratios)


def _quartiles(values: list[float]) -> Quartiles:
    return Quartiles(*(statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3))
