"""Training on this rank: one visible loop over steps."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import record_function

from research import comm
from research.build import build
from research.config import RunConfig, TrainConfig
from research.data.batches import HeldOut
from research.mesh import Mesh
from research.models.batch import Batch
from research.parallel.axis import cut_batch
from research.train.executor import Denominators, execute, forward_only, one_stage
from research.train.optim import learning_rate
from research.train.storage import Storage

GlobalMicrobatches = Callable[[int], Sequence[Batch]]  # step -> the global microbatches of that step


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
    eval_loss: float | None = None  # of the held-out text after this step, where it was evaluated


class Trainer:
    """What lasts from step to step on one rank."""

    def __init__(self, config: RunConfig, mesh: Mesh, device: torch.device) -> None:
        torch.use_deterministic_algorithms(config.train.deterministic)
        self.config, self.mesh, self.device = config, mesh, device
        self.world = mesh.group("world")
        self.built = build(config, mesh, device)
        self.storage = Storage(self.built, config.train, device)
        self.actions = one_stage(config.train.microbatches)

    def backward(self, microbatches: Sequence[Batch]) -> Tensor:
        """Forward and backward of one step's global microbatches. Returns (2,), the same on every rank: cross-entropy
        per counted token and auxiliary loss; the gradients are in storage."""
        counted = sum(int((b.targets >= 0).sum()) for b in microbatches)
        weigh = Denominators(counted, [b.tokens.numel() for b in microbatches])
        mine = [self._mine(b) for b in microbatches]
        totals = execute(self.actions, self.built, mine.__getitem__, weigh, self.storage)
        self.mesh.ledger.phase = "optimizer"
        return comm.all_reduce_(totals, self.world, "loss")

    def evaluate(self, held_out: HeldOut) -> float:
        """Cross-entropy per counted token of the held-out text, nats, the same on every rank; no auxiliary losses. It
        leaves weights, gradients, random generators and the phase of the ledger as they are."""
        ledger = self.mesh.ledger
        phase, actions = ledger.phase, forward_only(len(held_out))
        weigh = Denominators(1, [1] * len(held_out))  # sums, divided once
        totals = execute(actions, self.built, lambda m: self._mine(held_out.batch(m)), weigh, self.storage)
        comm.all_reduce_(totals, self.world, "loss")
        ledger.phase = phase
        return totals[0].item() / held_out.counted

    def update(self, index: int, totals: Tensor) -> tuple[list[float], bool]:
        """Clip and step. Returns [loss, auxiliary loss, gradient norm] and whether the step was made.

        A non-finite loss or norm is known to all ranks, as both are sums over the world; it changes no weight, and
        raises FloatingPointError where `train.nonfinite` says stop. Reading the three numbers is the one host sync of
        a step, after all its work is queued.
        """
        with record_function("optimizer"):
            norm = self.storage.norm()
            numbers = torch.cat([totals, norm[None]])
            self.storage.step(learning_rate(self.config.train, index), norm, numbers.isfinite().all())
        values = numbers.tolist()
        finite = all(v - v == 0 for v in values)
        if not finite and self.config.train.nonfinite == "stop":
            loss, aux, size = values
            raise FloatingPointError(f"step {index}: loss {loss}, auxiliary loss {aux}, gradient norm {size}")
        return values, finite

    def _mine(self, batch: Batch) -> Batch:
        """This rank's part of a global microbatch, on its device."""
        return cut_batch(batch, self.mesh).map(self._to_device)

    def _to_device(self, t: Tensor) -> Tensor:
        if self.device.type == "cuda":
            return t.pin_memory().to(self.device, non_blocking=True)
        return t


def train(trainer: Trainer, batches: GlobalMicrobatches, held_out: HeldOut | None = None) -> Iterator[Step]:
    """Run all steps of the config, yielding each as it ends; evaluations where `train.eval_every` says."""
    for index in range(trainer.config.train.steps):
        begin = time.perf_counter()
        microbatches = batches(index)
        (loss, aux, norm), made = trainer.update(index, trainer.backward(microbatches))
        tokens = sum(b.tokens.numel() for b in microbatches)
        ms = (time.perf_counter() - begin) * 1e3
        found = None
        if held_out is not None and evaluates(trainer.config.train, index):
            found = trainer.evaluate(held_out)
        yield Step(index, loss, aux, norm, tokens, not made, ms, found)


def evaluates(train: TrainConfig, index: int) -> bool:
    """Whether the held-out text is evaluated after step `index`: every so many steps, and after the last one."""
    return train.eval_every > 0 and ((index + 1) % train.eval_every == 0 or index + 1 == train.steps)
