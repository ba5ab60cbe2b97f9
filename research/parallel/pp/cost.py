"""What pipeline parallelism receives, in closed form; README.md states the same.

b samples of a microbatch, S tokens of a sample and D model on this rank
"""

from fractions import Fraction

from research.config import ELEMENT_BYTES, RunConfig, microbatch_tokens
from research.ledger import Bytes, added, largest
from research.parallel.pp import schedule_of
from research.parallel.pp.check import messages
from research.parallel.pp.schedule import Schedule


def traffic(config: RunConfig) -> Bytes:
    """Bytes that the rank with most of each receives along pp in one training step: b S D elements whenever a
    microbatch enters a stage whose neighbour is elsewhere, and as many when its gradient comes back. Sums of gradients
    between copies are in the formula of what stores them (dp)."""
    if config.pp.degree == 1:
        return {}
    element = ELEMENT_BYTES[config.train.dtype]
    cut = config.tp.degree if config.tp.sequence else 1
    sizes = [Fraction(n * config.model.dim * element, cut) for n in microbatch_tokens(config)]
    return largest(by_rank(schedule_of(config.pp, config.train.microbatches), sizes))


def by_rank(schedule: Schedule, sizes: list[Fraction]) -> list[Bytes]:
    """What each rank receives, for messages of these sizes by microbatch. A gradient counts in the pass that needs
    it."""
    actions = (a for rank in range(schedule.ranks) for a in schedule.flat(rank))
    backward = {(a.stage, a.microbatch): a.kind for a in actions if a.kind in ("B", "BW")}
    parts: list[list[tuple[str, Fraction]]] = [[] for _ in range(schedule.ranks)]
    for (_, receiver), sent in messages(schedule).items():
        for kind, stage, m in sent:
            label = f"activations/receive/{kind}"
            if kind != "F":
                label = f"gradients/receive/{backward[stage - 1, m]}"
            parts[receiver].append((label, sizes[m]))
    return [added(of_rank) for of_rank in parts]
