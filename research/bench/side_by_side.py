"""Two or more implementations of one computation, timed side by side in one run.

Machines are noisy, so what counts is a ratio: sides take turns, each repetition gives one ratio, the median counts. And
nothing is timed that was not shown to be equal: a fast wrong answer is easy.
"""

import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from research.config import LaunchConfig
from research.launch.local import start
from research.launch.process import Place

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

    return Side(f"{side.name}, torch's products", run)


@dataclass(frozen=True)
class Case:
    """One comparison: `ours` over each of `others`."""

    name: str
    threads: int  # CPU threads of this process
    tolerance: float  # relative error, ||a - b|| / ||b||, of each value
    ours: Side
    others: Sequence[Side]

    @property
    def sides(self) -> list[Side]:
        return [self.ours, *self.others]


@dataclass(frozen=True)
class RankedCase:
    """A comparison of what takes several ranks, each a process of this machine. `make` gives a rank its part of it; all
    ranks run the same side at a time, as its collectives make them meet."""

    name: str
    ranks: int
    launch: LaunchConfig
    make: Callable[[Place, torch.device], Case]

    @property
    def threads(self) -> int:
        """One each."""
        return self.ranks


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


def gate(case: Case) -> dict[str, float]:
    """The largest relative error of each other side. Raises NotEqualError past the tolerance."""
    torch.set_num_threads(case.threads)
    ours, errors = case.ours.run(), {}
    for side in case.others:
        theirs = side.run()
        if set(ours) != set(theirs):
            names = ", ".join(sorted(set(ours) ^ set(theirs)))
            raise NotEqualError(f"{case.name}: {case.ours.name} and {side.name} do not both have {names}")
        worst = max(ours, key=lambda name: _error(ours[name], theirs[name]))
        errors[side.name] = error = _error(ours[worst], theirs[worst])
        if not error <= case.tolerance:
            raise NotEqualError(
                f"{case.name}: {worst} of {case.ours.name} and {side.name} differ by {error:.1e}, "
                f"tolerance {case.tolerance:g}: nothing was timed"
            )
    return errors


Seconds = tuple[float, float]  # CPU, wall


@dataclass(frozen=True)
class Taken:
    """What was measured: by name of a side, times of each repetition, and of the others their error."""

    seconds: dict[str, list[Seconds]]
    errors: dict[str, float]
    ours: str


def compare(case: Case | RankedCase, repetitions: int, progress: Callable[[], None] = lambda: None) -> list[Result]:
    """Gate, then time in turns."""
    if isinstance(case, Case):
        taken = measure(case, repetitions, progress)
    else:
        make = case.make
        ranks = start(lambda place, device: measure(make(place, device), repetitions), case.ranks, case.launch)
        taken = together(ranks)
    ours = taken.seconds[taken.ours]
    return [_result(case, name, error, ours, taken.seconds[name]) for name, error in taken.errors.items()]


def measure(case: Case, repetitions: int, progress: Callable[[], None] = lambda: None) -> Taken:
    """The order reverses with each repetition, so that no side always runs on warm caches."""
    errors = gate(case)
    seconds: dict[str, list[Seconds]] = {side.name: [] for side in case.sides}
    for repetition in range(repetitions):
        for side in case.sides if repetition % 2 else reversed(case.sides):
            seconds[side.name].append(_timed(side.run))
        progress()
    return Taken(seconds, errors, case.ours.name)


def together(ranks: Sequence[Taken]) -> Taken:
    """CPU time of all ranks, wall time of the slowest, the largest errors."""

    def joined(times: Sequence[Seconds]) -> Seconds:
        return sum(cpu for cpu, _ in times), max(wall for _, wall in times)

    first = ranks[0]
    seconds = {
        name: [joined(times) for times in zip(*(r.seconds[name] for r in ranks), strict=True)] for name in first.seconds
    }
    return Taken(seconds, {name: max(r.errors[name] for r in ranks) for name in first.errors}, first.ours)


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


def _result(case: Case | RankedCase, other: str, error: float, ours: list[Seconds], theirs: list[Seconds]) -> Result:
    cpu, wall = ([a[i] / b[i] for a, b in zip(ours, theirs, strict=True)] for i in (0, 1))
    ours_ms, other_ms = (1e3 * statistics.median(t[0] for t in side) for side in (ours, theirs))
    ratios = _quartiles(cpu), _quartiles(wall)
    return Result(case.name, case.threads, other, len(ours), error, ours_ms, other_ms, *ratios)


def _quartiles(values: list[float]) -> Quartiles:
    return Quartiles(*(statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3))
