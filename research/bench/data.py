"""Training steps of data parallelism and of ZeRO's stage 3 against torch's DistributedDataParallel and fully_shard.

Both sides train the same decoder in float32 with clipped AdamW, from the same weights on the same tokens: what
distributes it differs, nothing else. Torch's side is timed once more with torch's own products, as its users have them.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from research.bench.side_by_side import RankedCase, RankedSide, Values
from research.bench.torch_data import TorchTraining
from research.bench.workload import STEPS, batch_of, beside, config_of, sizes, values_of
from research.config import RunConfig
from research.launch.process import Place
from research.mesh import Mesh


def cases(zero: int, peer: str) -> Iterator[RankedCase]:
    for ranks in (2, 4):
        config = config_of("dp", {"degree": ranks, "zero": zero})
        name = f"dp {ranks}, zero {zero}, {sizes(config)}"
        theirs = RankedSide(f"torch {peer}", partial(torchs, config, peer))
        yield beside(config, name, theirs, theirs.by_torch())


def torchs(config: RunConfig, peer: str, place: Place, device: torch.device) -> Callable[[], Values]:
    """Their steps on this rank."""
    mesh = Mesh.from_config(config, place.world, place.rank)
    batch, training = batch_of(config), TorchTraining(config, peer, mesh.group("world"), device)
    return lambda: values_of([training.step(batch) for _ in range(STEPS)])
