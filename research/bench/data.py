"""Training steps of data parallelism and of ZeRO's stage 3 against torch's DistributedDataParallel and fully_shard.

Both sides train the same decoder in float32 with clipped AdamW, from the same weights on the same tokens: what
distributes it differs, nothing else. Torch's side is timed once more with torch's own products, as its users have them.
"""

from collections.abc import Iterator
from functools import partial

import torch

from research.bench.side_by_side import Case, RankedCase, Side, by_torch
from research.bench.torch_data import TorchTraining
from research.bench.workload import STEPS, TOLERANCE, batch_of, config_of, our_sides, sizes, values_of
from research.config import RunConfig
from research.launch.process import Place
from research.mesh import Mesh


def cases(zero: int, peer: str) -> Iterator[RankedCase]:
    for ranks in (2, 4):
        config = config_of("dp", {"degree": ranks, "zero": zero})
        name = f"dp {ranks}, zero {zero}, {sizes(config)}"
        yield RankedCase(name, ranks, config.launch, partial(case, config, name, peer))


def case(config: RunConfig, name: str, peer: str, place: Place, device: torch.device) -> Case:
    """This rank's part of both."""
    batch, mesh = batch_of(config), Mesh.from_config(config, place.world, place.rank)
    ours, plain = our_sides(config, mesh, device)

    def torchs() -> Side:
        training = TorchTraining(config, peer, mesh.group("world"), device)
        return Side(f"torch {peer}", lambda: values_of([training.step(batch) for _ in range(STEPS)]))

    return Case(name, 1, TOLERANCE, ours, [torchs(), by_torch(torchs()), plain])
