"""A schedule simulated, for the papers' tables."""

from dataclasses import dataclass

from research.parallel.pp.check import messages, peaks
from research.parallel.pp.generate import generate
from research.parallel.pp.simulate import Timeline, even, simulate


@dataclass(frozen=True)
class Run:
    timeline: Timeline

    @property
    def rate(self) -> float:
        """Share of the longest rank's time in which it waits."""
        return self.timeline.bubble_alone

    @property
    def waits(self) -> tuple[float, ...]:
        """Time that each rank waits between its first and its last action."""
        return tuple(self.timeline.span(r) - self.timeline.busy(r) for r in range(self.timeline.schedule.ranks))

    @property
    def idle(self) -> tuple[float, ...]:
        """Time that each rank waits in the step."""
        return tuple(self.timeline.step - self.timeline.busy(r) for r in range(self.timeline.schedule.ranks))

    def peaks(self, kept: float = 1.0, late: float | None = None) -> tuple[float, ...]:
        """Most activations that each rank holds, counted in microbatches of 1/ranks of the model: `kept` from F on,
        `late` from B to W."""
        s = self.timeline.schedule
        share = s.ranks / s.stages
        return peaks(s, [kept * share] * s.stages, [(kept if late is None else late) * share] * s.stages)

    @property
    def sent(self) -> int:
        """Messages between ranks in a step."""
        return sum(map(len, messages(self.timeline.schedule).values()))


def run(
    name: str,
    ranks: int,
    microbatches: int,
    times: tuple[float, float, float] = (1, 1, 1),
    comm: float = 0.0,
    overlap: float = 1.0,
    per_rank: int | None = None,
) -> Run:
    """`times`: F, B and W of 1/ranks of the model."""
    schedule = generate(name, ranks, microbatches, per_rank)
    return Run(simulate(schedule, even(schedule, *times, comm=comm, overlap=overlap)))
