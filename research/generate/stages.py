"""One forward through all stages of the model, of which a rank may hold some.

n tokens whose logits are asked for, V vocabulary
"""

from torch import Tensor

from research.built import Built
from research.config import RunConfig
from research.models.batch import Batch
from research.models.decoder import holds
from research.parallel.axis import staged
from research.train.handover import Handover


class Stages:
    """Stages run one after another, as in an evaluation of one batch."""

    def __init__(self, config: RunConfig, built: Built) -> None:
        self.built = built
        self.program = staged(config).evaluation(config, built.mesh.at["pp"], 1)
        for way in self.program.ways:  # making groups is collective
            built.mesh.way(*way)

    def logits(self, batch: Batch, rows: Tensor) -> Tensor | None:
        """What follows the tokens with these numbers (n,): (n, V) on the ranks that hold the head, None on others."""
        model, found = self.built.model, None
        handover = Handover(self.program, self.built.mesh, lambda _: self.built.stream_like(batch))
        for action in handover.actions():
            x, parts = handover.stream(action), self.built.parts[action.stage]
            if holds(parts, "head"):
                found = model.logits(batch, rows, x, parts)
            else:
                handover.give(action, model.stream(batch, x, parts)[0])
        return found
