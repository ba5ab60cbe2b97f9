"""Pipeline parallelism: which layers a rank holds, and in which order it runs them. README.md beside this file."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache

from research.config import PpConfig, RunConfig
from research.mesh import Mesh
from research.models.batch import Batch
from research.models.products import Products
from research.models.seams import Seam
from research.parallel.pp.check import check
from research.parallel.pp.cut import FORM, LEGAL, cut_of, with_copies
from research.parallel.pp.generate import FILE, generate, refusals, stages_of
from research.parallel.pp.program import evaluation, program_of
from research.parallel.pp.schedule import Schedule, as_run
from research.problems import Problem
from research.train.action import Program

KEYS = {"schedule": "pp.schedule", "ranks": "pp.degree", "microbatches": "train.microbatches"}
KEYS |= {"stages per rank": "pp.stages_per_rank"}


class PipelineParallel:
    """Consecutive parts of the model are stages, ranks hold stages, microbatches go through them. It owns no seam: what
    crosses ranks is the residual stream between two layers, and its gradient, as they are on each rank. Under tensor
    parallelism without sequence parallelism that gradient is a part on each rank, so nothing here may sum it."""

    name = "pp"
    splits: Mapping[str, str] = {}

    def problems(self, config: RunConfig) -> Iterator[Problem]:
        """With degree 1 the other keys wait for a larger one, and refused is only what no degree would do. Stages are
        counted before a schedule is made, which would take long for too many."""
        pp, most = config.pp, config.model.layers + 2
        found = refusals(pp.schedule, pp.degree, config.train.microbatches, pp.stages_per_rank or None)
        found = [p for p in found if pp.degree > 1 or p.key != "ranks"]
        found = [dataclasses.replace(p, key=KEYS[p.key]) for p in found]
        if not FORM.fullmatch(pp.cut):
            found.append(Problem("pp.cut", pp.cut, "is no cut of the layers", LEGAL))
        yield from found
        if found or pp.degree == 1:
            return
        try:
            stages = stages_in(config)
        except ValueError as error:
            yield Problem("pp.schedule", pp.schedule, f"cannot be run: {error}", "one that fits, or another schedule")
            return
        if stages > most:
            rule = f"makes {stages} stages, of which some would be empty: model.layers={config.model.layers},"
            yield Problem("pp.degree", pp.degree, f"{rule} embedding and head are {most} parts", f"1 to {most} stages")
        elif pp.cut != "cost":  # which always fits
            try:
                cut_of(config, stages)
            except ValueError as error:
                yield Problem("pp.cut", pp.cut, f"does not fit: {error}", LEGAL)

    def seams(self, config: RunConfig, mesh: Mesh, products: Products) -> Mapping[str, Seam]:
        return {}

    def wraps(self, config: RunConfig, mesh: Mesh) -> Mapping[str, Callable[[Seam], Seam]]:
        return {}

    def cut_batch(self, batch: Batch, config: RunConfig, mesh: Mesh) -> Batch:
        """Whole: the first stage needs tokens, the last one targets, each one positions."""
        return batch

    def stages(self, config: RunConfig) -> Sequence[Mapping[int, Collection[str] | None]]:
        """By rank: its stages, and the parts of the model in each. None: all."""
        schedule = schedule_of(config.pp, config.train.microbatches)
        cut = [with_copies(config.model, parts) for parts in cut_of(config, schedule.stages)]
        return [{stage: cut[stage] for stage in stages} for stages in schedule.holds]

    def program(self, config: RunConfig, rank: int) -> Program:
        """What a rank runs in a step."""
        return program_of(schedule_of(config.pp, config.train.microbatches), rank)

    def evaluation(self, config: RunConfig, rank: int, batches: int) -> Program:
        """What a rank runs to evaluate so many batches."""
        return _evaluation_of(config.pp, config.train.microbatches, rank, batches)


def stages_in(config: RunConfig) -> int:
    """How many stages the schedule has. Raises ValueError for a file that cannot be run."""
    pp = config.pp
    if not pp.schedule.startswith(FILE):
        return stages_of(pp.schedule, pp.degree, pp.stages_per_rank or None)
    schedule = schedule_of(pp, config.train.microbatches)
    check(schedule)
    if idle := [rank for rank, stages in enumerate(schedule.holds) if not stages]:
        raise ValueError("; ".join(f"rank {rank} runs nothing" for rank in idle))
    return schedule.stages


@cache
def schedule_of(pp: PpConfig, microbatches: int) -> Schedule:
    return as_run(generate(pp.schedule, pp.degree, microbatches, pp.stages_per_rank or None))


@cache
def _evaluation_of(pp: PpConfig, microbatches: int, rank: int, batches: int) -> Program:
    """The same at every evaluation of a training."""
    return program_of(evaluation(schedule_of(pp, microbatches), batches), rank)
