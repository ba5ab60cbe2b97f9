"""The one loop over microbatches. A schedule is a list of actions for each rank; this runs the list of one rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from research.build import Built
from research.models.batch import Batch
from research.models.decoder import Output
from research.train.storage import Storage


class Action(NamedTuple):
    """One unit of work: F forward, BW backward with the gradients of inputs and weights."""

    kind: Literal["F", "BW"]
    stage: int
    microbatch: int


NAMES = {"F": "forward", "BW": "backward"}  # in traces


def one_stage(microbatches: int) -> list[Action]:
    """The list of a rank that holds the whole model: each microbatch forward, then at once backward."""
    return [Action(kind, 0, m) for m in range(microbatches) for kind in ("F", "BW")]


@dataclass(frozen=True)
class Denominators:
    """Known from the data of the step, without a collective."""

    counted: int  # tokens with a target, over all microbatches and ranks
    tokens: Sequence[int]  # of each global microbatch

    def seeds(self, microbatch: int) -> tuple[float, float]:
        """What a microbatch's loss sum and its auxiliary loss weigh in the loss of the step. A step without any
        counted token has loss 0 and changes nothing by it."""
        return 1 / max(self.counted, 1), self.tokens[microbatch] / sum(self.tokens)


def execute(
    actions: Sequence[Action], built: Built, batches: Sequence[Batch], weigh: Denominators, storage: Storage
) -> Tensor:
    """Run this rank's actions over its parts of the microbatches; gradients are summed in `storage`.

    Returns (2,): this rank's part of the step's cross-entropy and of its auxiliary losses.
    """
    outputs: dict[int, Output] = {}
    totals = torch.zeros(2, dtype=storage.grad_dtype, device=storage.device)
    last = max(i for i, action in enumerate(actions) if action.kind == "BW")
    for i, (kind, _, m) in enumerate(actions):
        built.mesh.ledger.phase = kind
        with record_function(f"{NAMES[kind]} {m}"):
            if kind == "F":
                outputs[m] = built.model(batches[m])
            else:
                output, seeds = outputs.pop(m), weigh.seeds(m)
                storage.begin_backward(last=i == last)
                torch.autograd.backward(output, [torch.full_like(o, s) for o, s in zip(output, seeds, strict=True)])
                for total, o, s in zip(totals, output, seeds, strict=True):
                    total.add_(o.detach(), alpha=s)
    storage.finish_backward()
    return totals
