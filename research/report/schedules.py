"""Pipeline schedules beside each other: simulated, and told in one table."""

from collections.abc import Sequence

import pandas as pd

from research.parallel.pp.check import check
from research.parallel.pp.generate import FAMILIES, generate
from research.parallel.pp.simulate import Timeline, even, simulate


def timelines(
    ranks: int,
    microbatches: int,
    names: Sequence[str] = tuple(FAMILIES),
    times: tuple[float, float, float, float] = (1, 1, 1, 0),
    overlap: float = 1.0,
) -> list[Timeline]:
    """Each schedule simulated. `times`: forward, gradient of the input, gradients of the weights of 1/ranks
    of the model, and a transfer. `overlap`: what an overlapped pair takes of its two parts one after the other."""
    made = [generate(name, ranks, microbatches) for name in names]
    return [simulate(schedule, even(schedule, *times, overlap)) for schedule in made]


def comparison(found: Sequence[Timeline]) -> pd.DataFrame:
    """A line a schedule. `bubble`: share of all ranks' time in which they wait for the last; `alone`: of the rank that
    takes longest from its own first action to its last; `peak`: activations of the fullest rank, in microbatches of
    1/ranks of the model; `weights`: copies of the model that all ranks together hold."""
    lines = {
        t.schedule.name: {
            "stages a rank": max(map(len, t.schedule.holds)),
            "step": t.step,
            "bubble": t.bubble,
            "alone": t.bubble_alone,
            "peak": max(check(t.schedule).live) * t.schedule.ranks / t.schedule.stages,
            "weights": sum(map(len, t.schedule.holds)) / t.schedule.stages,
        }
        for t in found
    }
    return pd.DataFrame.from_dict(lines, orient="index").rename_axis("schedule")


def bubbles(ranks: int, microbatches: Sequence[int], names: Sequence[str] = tuple(FAMILIES)) -> pd.DataFrame:
    """The bubble, a line for each number of microbatches, a column a schedule; forward and both backwards take 1."""
    columns = {n: [t.bubble for m in microbatches for t in timelines(ranks, m, [n])] for n in names}
    return pd.DataFrame(columns, index=pd.Index(microbatches, name="microbatches"))
