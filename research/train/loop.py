"""Training on this rank: one visible loop over steps."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from research import comm
from research.build import build
from research.config import RunConfig, TrainConfig
from research.data.batches import HeldOut
from research.mesh import Mesh
from research.models.batch import Batch
from research.parallel.axis import cut_batch, makes_parameters, staged, storage
from research.train.executor import Denominators, execute
from research.train.optim import learning_rate, move_biases

MOST_SKIPPED = 100  # non-finite steps in a row
RECENT = 16  # batches of an evaluation that several stages of a rank are given
GlobalMicrobatches = Callable[[int], Sequence[Batch]]  # step -> the global microbatches of that step


class Load(NamedTuple):
    """What one MoE layer's experts were given in a step, by expert."""

    choices: Sequence[int]  # how often it was chosen
    dropped: Sequence[int]  # of these, beyond its capacity


@dataclass(frozen=True)
class Step:
    """One optimizer step, the same on every rank."""

    index: int
    loss: float  # cross-entropy, nats per counted token
    aux: float  # auxiliary losses, already weighted
    norm: float  # of the gradient, before clipping
    tokens: int
    skipped: bool
    ms: float  # without the evaluation
    exposed_ms: Mapping[str, float]  # of which this rank waited, by axis
    loads: Mapping[str, Load]  # by MoE layer of this rank's stage
    eval_loss: float | None = None  # of the held-out text after this step, where it was evaluated
    ahead: Sequence[float] = ()  # cross-entropy by depth of multi-token prediction, not weighted


class Sums(NamedTuple):
    """What a step's backward leaves beside the gradients in storage, the same on every rank."""

    totals: Tensor  # (2 + depths,) cross-entropy per counted token, auxiliary loss, cross-entropy of each depth
    counted: int  # tokens with a target
    by_microbatch: Tensor  # (M, 2 + depths), whose sums are the totals
    asked: Tensor  # (1,) how many ranks were asked to end the run; (0,) where nobody would be


class Trainer:
    """What lasts from step to step on one rank."""

    def __init__(self, config: RunConfig, mesh: Mesh, device: torch.device) -> None:
        torch.use_deterministic_algorithms(config.train.deterministic)
        self.config, self.mesh, self.device = config, mesh, device
        self.world = mesh.group("world")
        self.built = build(config, mesh, device, later=makes_parameters(config))
        self.storage = storage(config, self.built, device)
        self.execute = execute
        self.staged = staged(config)
        self.program = self.staged.program(config, mesh.at["pp"])
        for way in self.program.ways:  # making groups is collective
            mesh.way(*way)
        self.skipped_in_a_row = 0
        self.loads: dict[str, Tensor] = {}  # of the last step, by MoE layer: chosen and dropped (2, E)
        self.asked: Callable[[], bool] | None = None  # whether this rank was asked to end the run; None: nobody will be
        self.stopping = False  # whether any rank was, by the last step: the same on all of them

    def backward(self, microbatches: Sequence[Batch]) -> Sums:
        """Forward and backward of one step's global microbatches."""
        c = self.config.model
        counted = _counted(b.targets for b in microbatches)
        ahead = [_counted(b.ahead[k].targets for b in microbatches) for k in range(c.mtp_depth)]
        tokens = [b.tokens.numel() for b in microbatches]
        weigh = Denominators(counted, tokens, ahead, c.mtp_weight / max(c.mtp_depth, 1))
        mine = [self._mine(b) for b in microbatches]
        losses = self.execute(self.program, self.built, mine.__getitem__, weigh, self.storage)
        self.mesh.ledger.phase = "optimizer"
        told = losses.flatten()
        if self.asked is not None:  # it travels with the losses: no collective and no host sync of its own
            told = torch.cat([told, told.new_full((1,), self.asked())])
        comm.all_reduce_(told, self.world, "loss")
        losses = told[: losses.numel()].view_as(losses)
        return Sums(losses.sum(0), counted, losses, told[losses.numel() :])

    def evaluate(self, held_out: HeldOut) -> float:
        """Cross-entropy per counted token of the held-out text, nats, the same on every rank; no auxiliary losses. It
        leaves weights, gradients, random generators and the phase of the ledger as they are."""
        ledger = self.mesh.ledger
        phase = ledger.phase
        program = self.staged.evaluation(self.config, self.mesh.at["pp"], len(held_out))
        weigh = Denominators(1, [1] * len(held_out))  # sums, divided once
        mine = lru_cache(RECENT)(lambda m: self._mine(held_out.batch(m)))
        totals = execute(program, self.built, mine, weigh, self.storage).sum(0)
        comm.all_reduce_(totals, self.world, "loss")
        ledger.phase = phase
        return totals[0].item() / held_out.counted

    def update(self, index: int, sums: Sums) -> tuple[list[float], bool]:
        """Clip and step: `queue`, then `read`."""
        return self.read(index, sums, self.queue(index, sums))

    def queue(self, index: int, sums: Sums) -> Tensor:
        """Queue the optimizer's work. Returns (3 + depths,) `sums.totals` and the gradient norm, and `sums.asked`. A
        step whose numbers are not finite, or without any counted token, changes no weight; all ranks know both."""
        with record_function("optimizer"):
            norm = self.storage.norm()
            numbers = torch.cat([sums.totals, norm[None]])
            good = numbers.isfinite().all() & (sums.counted > 0)
            self.storage.step(learning_rate(self.config.train, index), norm, good)
            self.loads = move_biases(self.built, good)
        return torch.cat([numbers, sums.asked])

    def read(self, index: int, sums: Sums, numbers: Tensor) -> tuple[list[float], bool]:
        """The numbers of a queued step, and whether it was made. Here the host waits for the device; what else a step
        tells (loads, times of waiting) is there by then. Raises FloatingPointError on every rank where the numbers are
        not finite and `train.nonfinite` says stop, or where as many steps in a row were skipped that training has ended
        by itself."""
        known, count = numbers.tolist(), len(sums.totals) + 1
        values, self.stopping = known[:count], any(known[count:])
        finite = all(math.isfinite(v) for v in values)
        made = finite and sums.counted > 0
        self.skipped_in_a_row = 0 if made else self.skipped_in_a_row + 1
        if not finite and (self.config.train.nonfinite == "stop" or self.skipped_in_a_row >= MOST_SKIPPED):
            loss, aux, *ahead, size = values
            told = "".join(f", loss of depth {k} {value}" for k, value in enumerate(ahead, 1))
            told = f"step {index}: loss {loss}, auxiliary loss {aux}{told}, gradient norm {size}"
            raise FloatingPointError(f"{told} ({self.skipped_in_a_row} steps in a row)")
        return values, made

    def _mine(self, batch: Batch) -> Batch:
        """This rank's part of a global microbatch, on its device."""
        return cut_batch(batch, self.config, self.mesh).map(self._to_device)

    def _to_device(self, t: Tensor) -> Tensor:
        if self.device.type == "cuda":
            return t.pin_memory().to(self.device, non_blocking=True)
        return t


def train(
    trainer: Trainer, batches: GlobalMicrobatches, held_out: HeldOut | None = None, first: int = 0
) -> Iterator[Step]:
    """Run all steps of the config from `first` on, yielding each as it ends; evaluations where `train.eval_every`
    says. What is done between two steps counts as time of the second one."""
    following = batches(first)
    begin = time.perf_counter()
    for index in range(first, trainer.config.train.steps):
        microbatches = following
        sums = trainer.backward(microbatches)
        numbers = trainer.queue(index, sums)
        following = batches(index + 1)  # prepared while the device is at work
        (loss, aux, *ahead, norm), made = trainer.read(index, sums, numbers)
        exposed = trainer.mesh.ledger.settle()
        # From end to end, so that what watches a step on rank 0 counts: the other ranks wait for it.
        now = time.perf_counter()
        ms, begin, found = (now - begin) * 1e3, now, None
        if held_out is not None and evaluates(trainer.config.train, index):
            found = trainer.evaluate(held_out)
            begin = time.perf_counter()
        tokens = sum(b.tokens.numel() for b in microbatches)
        yield Step(index, loss, aux, norm, tokens, not made, ms, exposed, read_loads(trainer.loads), found, ahead)


def _counted(targets: Iterable[Tensor]) -> int:
    return sum(int((t >= 0).sum()) for t in targets)


def read_loads(loads: Mapping[str, Tensor]) -> dict[str, Load]:
    """Those of all layers on the host by one copy: one a layer would be a sync for each."""
    layers = torch.stack(list(loads.values())).tolist() if loads else []
    return {name: Load(*load) for name, load in zip(loads, layers, strict=True)}


def evaluates(train: TrainConfig, index: int) -> bool:
    """Whether the held-out text is evaluated after step `index`: every so many steps, and after the last one."""
    return train.eval_every > 0 and ((index + 1) % train.eval_every == 0 or index + 1 == train.steps)
