"""A training step at cp=2 against torch's own ring attention in a plain decoder, on two processes, and against one
process. The ring is balanced by zigzag on both sides.

All take steps of AdamW on one batch, in float32, from equal weights: the loss of a later step tells whether gradients
and optimizer agree, too.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from research import comm
from research.bench.side_by_side import RankedCase, RankedSide, Values
from research.bench.torch_context import TorchRingTraining
from research.bench.workload import STEPS, batch_of, beside, config_of, losses_of, sizes
from research.config import RunConfig, replace
from research.launch.process import Place
from research.mesh import Mesh
from research.parallel.axis import cut_batch
from research.train.loop import Trainer

RANKS = 2


def cases() -> Iterator[RankedCase]:
    config = config_of("cp", {"degree": RANKS, "method": "ring", "balance": "zigzag"}, clip=0.0)
    name = f"cp {RANKS}, ring and zigzag, {sizes(config)}"
    ring = RankedSide("torch's ring attention, DDP", partial(torchs, config))
    yield beside(config, name, ring, RankedSide("one process", partial(one_process, config)))


def torchs(config: RunConfig, place: Place, device: torch.device) -> Callable[[], Values]:
    """Their steps on this rank."""
    mine = cut_batch(batch_of(config), config, Mesh.from_config(config, place.world, place.rank))
    whole = Trainer(replace(config, {"cp.degree": 1}), Mesh({}), device)
    training = TorchRingTraining(config, {n: weight for n, _, weight in whole.storage.weights()}, device)
    return lambda: {"losses": torch.stack([training.step(mine) for _ in range(STEPS)])}


def one_process(config: RunConfig, place: Place, device: torch.device) -> Callable[[], Values]:
    """The first rank's part is all; the other waits to be told."""
    world = Mesh.from_config(config, place.world, place.rank).group("world")
    batch, whole = batch_of(config), Trainer(replace(config, {"cp.degree": 1}), Mesh({}), device)

    def run() -> Values:
        told = comm.gather_objects(losses_of(whole, batch) if place.rank == 0 else None, world, "losses")[0]
        assert told is not None
        return {"losses": told}

    return run
