"""The one loop over microbatches. A schedule is a list of actions for each rank; this runs the list of one rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.profiler import record_function

from research.built import Built
from research.ledger import EVAL
from research.models.batch import Batch
from research.models.decoder import Output
from research.train.action import Action
from research.train.storage import Storage

NAMES = {"F": "forward", "BW": "backward"}  # in traces


def one_stage(microbatches: int) -> list[Action]:
    """The list of a rank that holds the whole model: each microbatch forward, then at once backward."""
    return [action for m in range(microbatches) for action in (Action("F", 0, m), Action("BW", 0, m))]


def forward_only(microbatches: int) -> list[Action]:
    """The list of an evaluation: no gradients, so no graph is kept."""
    return [Action("F", 0, m) for m in range(microbatches)]


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
    actions: Sequence[Action],
    built: Built,
    batch: Callable[[int], Batch],
    weigh: Denominators,
    storage: Storage,
) -> Tensor:
    """Run this rank's actions; `batch(m)` is its part of microbatch m, and gradients are summed in `storage`. A list
    without a backward is an evaluation: its traffic has a phase of its own, and it touches nothing.

    Returns (2 + depths,): this rank's part of the cross-entropy, of the auxiliary losses, and of the cross-entropy of
    each depth of multi-token prediction, in float64 of an evaluation, which may add up far more tokens than a step.
    """
    outputs: dict[int, Output] = {}
    backward = [i for i, action in enumerate(actions) if action.kind == "BW"]
    dtype = storage.dtype if backward else torch.float64
    totals = torch.zeros(2 + len(weigh.ahead), dtype=dtype, device=storage.device)
    for i, (kind, stage, m) in enumerate(actions):
        built.mesh.ledger.phase = kind if backward else EVAL
        with record_function(f"{NAMES[kind] if backward else EVAL} {m}"):
            if kind == "F":
                storage.begin_forward(stage)
                with torch.set_grad_enabled(bool(backward)):
                    output = built.model(batch(m))
                for total, o, s in zip(totals, output.terms, weigh.shares(m), strict=True):
                    total.add_(o.detach(), alpha=s)
                if backward:
                    outputs[m] = output
            else:
                storage.begin_backward(stage, last=i == backward[-1])
                terms = outputs.pop(m).terms
                seeds = [torch.full_like(o, s) for o, s in zip(terms, weigh.seeds(m), strict=True)]
                torch.autograd.backward(terms, seeds)
                storage.end_backward(stage, last=i == backward[-1])
    if backward:
        storage.finish_backward()
    return totals
