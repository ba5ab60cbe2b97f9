"""A step of a pipeline on ranks of this machine, beside the simulation of its schedule.

The executor runs the schedule with everything that it does in a training; what a stage computes is either what it is,
or a sleep of a given time, so that ranks need no cores.
"""

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import ParamSpec

import torch
from torch import Tensor, nn

from research import comm
from research.config import RunConfig
from research.data.tokens import open_tokens
from research.launch.local import start
from research.launch.process import Place
from research.ledger import Ledger
from research.mesh import Group, Mesh, total_ranks
from research.models.batch import Batch
from research.models.decoder import Output, Parts, holds, names_of
from research.models.products import Products
from research.parallel.pp import schedule_of
from research.parallel.pp.schedule import Schedule
from research.parallel.pp.simulate import Times, even, simulate
from research.train.action import Action
from research.train.executor import execute
from research.train.loop import Trainer
from research.train.run import global_batches

P = ParamSpec("P")
STEPS = 3  # the first one is not timed, the best of the others counts


@dataclass(frozen=True)
class Beside:
    """One schedule: a step, milliseconds."""

    schedule: str
    measured_ms: float
    simulated_ms: float

    @property
    def ratio(self) -> float:
        return self.measured_ms / self.simulated_ms


def one_by_one(schedule: Schedule) -> Schedule:
    """As the executor runs it: the second of a pair after the first, which has handed over what it made by then."""
    return dataclasses.replace(schedule, actions=tuple(tuple(schedule.flat(r)) for r in range(schedule.ranks)))


def slept(config: RunConfig, f: float, b: float, w: float) -> Beside:
    """`f`, `b`, `w`: seconds of 1/ranks of the model, for a forward and the two halves of a backward."""
    schedule = one_by_one(schedule_of(config.pp, config.train.microbatches))
    times = even(schedule, f, b, w)

    def body(place: Place, device: torch.device) -> float:
        trainer = Trainer(config, Mesh.from_config(config, place.world, place.rank), device)
        trainer.built = dataclasses.replace(trainer.built, model=Sleeper(trainer, times))  # type: ignore[arg-type]
        return min(_steps(trainer)[1:])

    measured = start(body, total_ranks(config), config.launch)[0]
    return Beside(config.pp.schedule, measured * 1e3, simulate(schedule, times).step * 1e3)


def computed(config: RunConfig) -> Beside:
    """Times of a stage are those that its passes took in the same steps, without waiting for others."""
    schedule = one_by_one(schedule_of(config.pp, config.train.microbatches))

    def body(place: Place, device: torch.device) -> tuple[list[float], list[tuple[Action, float]]]:
        trainer = Trainer(config, Mesh.from_config(config, place.world, place.rank), device)
        taken: list[tuple[Action, float]] = []
        trainer.execute = partial(execute, around=partial(_clocked, trainer.mesh.ledger, taken))
        walls = _steps(trainer)
        return walls, taken

    walls, passes = zip(*start(body, total_ranks(config), config.launch), strict=True)
    best = min(range(1, STEPS), key=walls[0].__getitem__)
    of_best = [taken[best * len(taken) // STEPS : (best + 1) * len(taken) // STEPS] for taken in passes]
    step = simulate(schedule, _times(schedule, [pair for taken in of_best for pair in taken])).step
    return Beside(config.pp.schedule, walls[0][best] * 1e3, step * 1e3)


def _steps(trainer: Trainer) -> list[float]:
    """Seconds from the first rank's start to the last rank's end, of the schedule of each step."""
    batches = global_batches(trainer.config, open_tokens(trainer.config.data)).microbatches_of(0)
    spans: list[tuple[float, float]] = []
    trainer.execute = _timed(trainer.execute, trainer.world, spans)
    for _ in range(STEPS):
        trainer.backward(batches)
        trainer.storage.step(0.0, trainer.storage.norm(), torch.tensor(False))
    everyone = comm.gather_objects(spans, trainer.world, "times")
    return [max(end for _, end in step) - min(begin for begin, _ in step) for step in zip(*everyone, strict=True)]


def _timed(run: Callable[P, Tensor], world: Group, spans: list[tuple[float, float]]) -> Callable[P, Tensor]:
    """The same, which begins on all ranks at once and notes its begin and its end."""

    def timed(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        comm.all_reduce_(torch.zeros(1), world, "start")
        begin = time.monotonic()
        found = run(*args, **kwargs)
        spans.append((begin, time.monotonic()))
        return found

    return timed


class Sleeper(nn.Module):
    """Stages that sleep. Each has one weight, so that gradients take the way that they take."""

    def __init__(self, trainer: Trainer, times: Times) -> None:
        super().__init__()
        built = trainer.built
        self.c, self._times, self._products = built.model.c, times, built.seams.products
        self._stage = {id(parts): stage for stage, parts in built.parts.items()}
        weights = dict(built.model.named_parameters())
        self._weight = {s: weights[next(names_of(parts, weights))] for s, parts in built.parts.items()}

    def forward(self, batch: Batch, x: Tensor | None, parts: Parts) -> Output:
        stage = self._stage[id(parts)]
        x = torch.zeros(*batch.tokens.shape, self.c.dim, dtype=self._weight[stage].dtype) if x is None else x
        y: Tensor = _Sleep.apply(x, self._weight[stage], stage, self._times, self._products)
        nothing = torch.zeros((), requires_grad=True)
        return Output(y.sum() * 0, nothing) if holds(parts, "head") else Output(nothing, nothing, (), y)


class _Sleep(torch.autograd.Function):
    """
    forward   (B, S, D) -> (B, S, D)   as it is, after the time of F
    backward  (B, S, D) -> (B, S, D)   as it comes, after the time of B; zeros for the weight after that of W
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, stage: int, times: Times, products: Products) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.about = weight, stage, times, products
        time.sleep(times.forward[stage])
        return x.clone()

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
        weight, stage, times, products = ctx.about
        time.sleep(times.backward[stage])

        def gradients() -> Sequence[Tensor]:
            time.sleep(times.weight[stage])
            return [torch.zeros_like(weight)]

        return dy, *products.gradients([weight], gradients), None, None, None


@contextmanager
def _clocked(ledger: Ledger, taken: list[tuple[Action, float]], action: Action) -> Iterator[None]:
    """Notes what an action takes, without its waiting for other ranks."""
    ledger.settle()
    since = time.perf_counter()
    yield
    taken.append((action, time.perf_counter() - since - sum(ledger.settle().values()) / 1e3))


def _times(schedule: Schedule, taken: Sequence[tuple[Action, float]]) -> Times:
    """Means by stage. Where nothing but BW was run, it is told as a B that takes all of its time."""
    found: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for (kind, stage, _), seconds in taken:
        found[kind, stage].append(seconds)
    f, b, w, bw = ([fmean(found[kind, s] or [0.0]) for s in range(schedule.stages)] for kind in ("F", "B", "W", "BW"))
    b = [split or both for split, both in zip(b, bw, strict=True)]
    return Times(f, b, w, [0.0] * (schedule.stages - 1))
