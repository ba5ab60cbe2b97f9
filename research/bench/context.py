"""A training step at cp=2 against torch's own ring attention in a plain decoder, on two processes, and against one
process. The ring is balanced by zigzag on both sides.

All take steps of AdamW on one batch, in float32, from equal weights: the loss of a later step tells whether gradients
and optimizer agree, too.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from research import comm
from research.bench.side_by_side import Case, RankedCase, Side, Values
from research.bench.torch_context import TorchRingTraining
from research.bench.workload import STEPS, TOLERANCE, batch_of, config_of, losses_of, our_sides, sizes
from research.config import RunConfig, replace
from research.launch.process import Place
from research.mesh import Mesh
from research.parallel.axis import cut_batch
from research.train.loop import Trainer

RANKS = 2


def cases() -> Iterator[RankedCase]:
    config = config_of("cp", {"degree": RANKS, "method": "ring", "balance": "zigzag"}, clip=0.0)
    name = f"cp {RANKS}, ring and zigzag, {sizes(config)}"
    yield RankedCase(name, RANKS, config.launch, partial(case, config, name))


def case(config: RunConfig, name: str, place: Place, device: torch.device) -> Case:
    """This rank's part of all three; of the one process, the first rank's is all."""
    batch = batch_of(config)
    mesh = Mesh.from_config(config, place.world, place.rank)
    world, mine = mesh.group("world"), cut_batch(batch, config, mesh)
    ours, plain = our_sides(config, mesh, device)
    whole = Trainer(replace(config, {"cp.degree": 1}), Mesh({}), device)
    other = TorchRingTraining(config, {n: weight for n, _, weight in whole.storage.weights()}, device)

    def run_one() -> Values:
        losses = losses_of(whole, batch) if place.rank == 0 else None
        told = comm.gather_objects(losses, world, "losses")[0]
        assert told is not None
        return {"losses": told}

    sides: dict[str, Callable[[], Values]] = {
        "torch's ring attention, DDP": lambda: {"losses": torch.stack([other.step(mine) for _ in range(STEPS)])},
        "one process": run_one,
    }
    return Case(name, 1, TOLERANCE, ours, [*(Side(n, run) for n, run in sides.items()), plain])
