"""The one loop over microbatches. A schedule is a list of actions for each rank; this runs the list of one rank.

B batch, S local sequence, D model
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.profiler import record_function

from research.built import Built
from research.ledger import EVAL
from research.models.batch import Batch
from research.models.decoder import Output
from research.models.products import Kept
from research.train.action import Action, Program, made
from research.train.handover import Handover
from research.train.storage import Storage

NAMES = {"F": "forward", "BW": "backward", "B": "input gradients", "W": "weight gradients"}  # in traces
Roots = list[Tensor | GradientEdge]
Around = Callable[[Action], AbstractContextManager[object]]


@dataclass(frozen=True)
class Denominators:
    """Known from the data of the step, without a collective."""

    counted: int  # tokens with a target, over all microbatches and ranks
    tokens: Sequence[int]  # of each global microbatch
    ahead: Sequence[int] = ()  # as `counted`, by depth of multi-token prediction
    ahead_weight: float = 0.0  # of the loss of one depth in the loss of the step

    def shares(self, microbatch: int) -> list[float]:
        """What the terms of a microbatch weigh in those of the step: each sum of cross-entropies is divided by its own
        count. A step without any counted token has loss 0."""
        means = [1 / max(n, 1) for n in (self.counted, *self.ahead)]
        return [means[0], self.tokens[microbatch] / self._total, *means[1:]]

    def seeds(self, microbatch: int) -> list[float]:
        """What they weigh in the loss whose gradient is taken; backward starts from these."""
        loss, aux, *ahead = self.shares(microbatch)
        return [loss, aux, *(share * self.ahead_weight for share in ahead)]

    @cached_property
    def _total(self) -> int:
        return sum(self.tokens)


def execute(
    program: Program,
    built: Built,
    batch: Callable[[int], Batch],
    weigh: Denominators,
    storage: Storage,
    around: Around = nullcontext,
) -> Tensor:
    """Run this rank's program; `batch(m)` is its part of microbatch m, and gradients are summed in `storage`. A program
    without a backward is an evaluation: its traffic has a phase of its own, and it touches nothing. Each action runs
    inside of `around(action)`.

    Returns (M, 2 + depths), for each microbatch this rank's part of the cross-entropy, of the auxiliary losses, and of
    the cross-entropy of each depth of multi-token prediction, in float64 of an evaluation, which may add up far more
    tokens than a step.
    """
    walk = _Walk(program, built, batch, weigh, storage)
    for action in walk.handover.actions():
        with around(action):
            walk.run(action)
    walk.finish()
    return walk.losses


class _Walk:
    """One walk through a program: what is alive between its actions."""

    def __init__(
        self, program: Program, built: Built, batch: Callable[[int], Batch], weigh: Denominators, storage: Storage
    ) -> None:
        self.built, self.batch, self.weigh, self.storage = built, batch, weigh, storage
        actions = program.actions
        self.trains = any(a.kind != "F" for a in actions)
        dtype = storage.dtype if self.trains else torch.float64
        shape = len(weigh.tokens), 2 + len(weigh.ahead)
        self.losses = torch.zeros(shape, dtype=dtype, device=storage.device)
        self.handover = Handover(program, built.mesh, lambda m: built.stream_like(batch(m)))
        self._last = {a.stage: a for a in actions if a.kind in ("W", "BW")}  # of each stage, to make gradients
        self._inputs: dict[tuple[int, int], Tensor | None] = {}  # by stage and microbatch, as all that follow
        self._roots: dict[tuple[int, int], Roots] = {}
        self._kept: dict[tuple[int, int], list[Kept]] = {}

    def run(self, action: Action) -> None:
        self.built.mesh.ledger.phase = action.kind if self.trains else EVAL
        with record_function(f"{NAMES[action.kind] if self.trains else EVAL} {action.microbatch}"):
            if action.kind == "F":
                self._forward(action)
            elif action.kind == "W":
                self._weight_gradients(action)
            else:
                self._backward(action)

    def finish(self) -> None:
        assert not self._inputs and not self._kept
        if self.trains:
            self.storage.finish_backward()

    def _forward(self, action: Action) -> None:
        _, stage, m = action
        self.storage.begin_forward(stage)
        x = self.handover.stream(action)
        with torch.set_grad_enabled(self.trains):
            x = x if x is None else x.requires_grad_(self.trains)
            output = self.built.model(self.batch(m), x, self.built.parts[stage])
        for loss, term, share in zip(self.losses[m], output.terms, self.weigh.shares(m), strict=True):
            loss.add_(term.detach(), alpha=share)
        if output.hidden is not None:
            self.handover.give(action, output.hidden.detach())
        if self.trains:
            self._inputs[stage, m] = x
            self._roots[stage, m] = roots_of(output)

    def _backward(self, action: Action) -> None:
        kind, stage, m = action
        products = self.built.seams.products
        products.kept = [] if kind == "B" else None
        self.storage.begin_backward(stage, last=action == self._last[stage])
        roots, x = self._roots.pop((stage, m)), self._inputs.pop((stage, m))
        weights = self.weigh.seeds(m)
        seeds = [torch.full_like(r, s) for r, s in zip(roots, weights, strict=False) if isinstance(r, Tensor)]
        if isinstance(roots[-1], GradientEdge):
            seeds.append(self.handover.take(Action("B", stage + 1, m)))
        torch.autograd.backward(roots, seeds)  # type: ignore[arg-type]
        if x is not None:
            assert x.grad is not None
            self.handover.give(made(action), x.grad)
        if products.kept is not None:
            self._kept[stage, m], products.kept = products.kept, None
        else:
            self.storage.end_backward(stage, last=action == self._last[stage])

    @torch.no_grad()
    def _weight_gradients(self, action: Action) -> None:
        _, stage, m = action
        kept = self._kept.pop((stage, m))
        while kept:  # each lets go of its tensors
            weights, gradients = kept.pop()
            for weight, gradient in zip(weights, gradients(), strict=True):
                self.storage.accumulate(weight, gradient)
        self.storage.end_backward(stage, last=action == self._last[stage])


def roots_of(output: Output) -> Roots:
    """Where backward starts: loss terms, then the stream that went to the next stage, of which nothing but the place in
    the graph need stay."""
    terms: Roots = [*output.terms]
    return terms if output.hidden is None else [*terms, get_gradient_edge(output.hidden)]
