"""Training steps of data parallelism and of ZeRO's stage 3 against torch's DistributedDataParallel and fully_shard.

Both sides train the same decoder in float32 with clipped AdamW, from the same weights on the same tokens: what
distributes it differs, nothing else.
"""

from collections.abc import Iterator
from functools import partial

import torch

from research.bench.side_by_side import Case, RankedCase, Side, Values
from research.bench.torch_data import TorchTraining
from research.config import RunConfig
from research.launch.process import Place
from research.mesh import Mesh
from research.models.batch import Batch
from research.settings import from_mapping
from research.train.loop import Trainer

STEPS = 2
TOLERANCE = 1e-5  # float32 sums in another order
MODEL = {"vocab": 4096, "dim": 256, "layers": 8, "heads": 8, "kv_heads": 4, "head_dim": 32, "ffn": 768, "experts": 0}
TRAIN = {"global_batch": 4, "steps": 10**6, "warmup_steps": 0, "schedule": "wsd"}
LENGTH = 512


def cases(zero: int, peer: str) -> Iterator[RankedCase]:
    for ranks in (2, 4):
        dp = {"degree": ranks, "zero": zero}
        config = from_mapping({"model": MODEL, "dp": dp, "data": {"sequence": LENGTH}, "train": TRAIN})
        sizes = f"{TRAIN['global_batch']} x {LENGTH} tokens, D {config.model.dim}, {config.model.layers} layers"
        name = f"dp {ranks}, zero {zero}, {sizes}"
        yield RankedCase(name, ranks, config.launch, partial(case, config, name, peer))


def case(config: RunConfig, name: str, peer: str, place: Place, device: torch.device) -> Case:
    """This rank's part of both."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.model.vocab, (config.train.global_batch, LENGTH + 1), generator=generator)
    positions = torch.arange(LENGTH).expand(len(ids), -1)
    batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), positions, torch.zeros_like(positions))
    trainer = Trainer(config, Mesh.from_config(config, place.world, place.rank), device)
    other = TorchTraining(config, peer, trainer.world, device)

    def run_ours() -> Values:
        steps = [trainer.update(step, trainer.backward([batch]))[0] for step in range(STEPS)]
        return {"losses and norms": torch.tensor([(loss, norm) for loss, _, norm in steps])}

    def run_theirs() -> Values:
        return {"losses and norms": torch.tensor([other.step(batch) for _ in range(STEPS)])}

    return Case(name, 1, TOLERANCE, Side("quintet", run_ours), [Side(f"torch {peer}", run_theirs)])
