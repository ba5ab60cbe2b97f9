"""A training step at cp=2 against torch's own ring attention in a plain decoder, on two processes, and against one
process. The ring is balanced by zigzag on both sides.

All take steps of AdamW on one batch, in float32, from equal weights: the loss of a later step tells whether gradients
and optimizer agree, too.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from research import comm
from research.bench.side_by_side import Case, RankedCase, Side, Values
from research.bench.tensor import MODEL, TRAIN
from research.bench.torch_context import TorchRingTraining
from research.config import RunConfig, replace
from research.launch.process import Place
from research.mesh import Mesh
from research.models.batch import Batch
from research.parallel.axis import cut_batch
from research.settings import from_mapping
from research.train.loop import Trainer

RANKS, STEPS = 2, 2
TOLERANCE = 1e-5  # float32 sums in another order
LENGTH = 512


def cases() -> Iterator[RankedCase]:
    cp = {"degree": RANKS, "method": "ring", "balance": "zigzag"}
    config = from_mapping({"model": MODEL, "cp": cp, "data": {"sequence": LENGTH}, "train": TRAIN})
    sizes = f"{TRAIN['global_batch']} x {LENGTH} tokens, D {config.model.dim}, {config.model.layers} layers"
    name = f"cp {RANKS}, ring and zigzag, {sizes}"
    yield RankedCase(name, RANKS, config.launch, partial(case, config, name))


def case(config: RunConfig, name: str, place: Place, device: torch.device) -> Case:
    """This rank's part of all three; of the one process, the first rank's is all."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.model.vocab, (config.train.global_batch, LENGTH + 1), generator=generator)
    positions = torch.arange(LENGTH).expand(len(ids), -1)
    batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), positions, torch.zeros_like(positions))
    mesh = Mesh.from_config(config, place.world, place.rank)
    world, mine = mesh.group("world"), cut_batch(batch, config, mesh)
    trainer, whole = Trainer(config, mesh, device), Trainer(replace(config, {"cp.degree": 1}), Mesh({}), device)
    other = TorchRingTraining(config, {n: weight for n, _, weight in whole.storage.weights()}, device)

    def steps(trainer: Trainer) -> Tensor:
        losses = []
        for step in range(STEPS):
            sums = trainer.backward([batch])
            trainer.update(step, sums)
            losses.append(sums.totals[0])
        return torch.stack(losses)

    def run_one() -> Values:
        losses = steps(whole) if place.rank == 0 else None
        told = comm.gather_objects(losses, world, "losses")[0]
        assert told is not None
        return {"losses": told}

    sides: dict[str, Callable[[], Values]] = {
        "torch's ring attention, DDP": lambda: {"losses": torch.stack([other.step(mine) for _ in range(STEPS)])},
        "one process": run_one,
    }
    ours = Side("quintet", lambda: {"losses": steps(trainer)})
    return Case(name, 1, TOLERANCE, ours, [Side(n, run) for n, run in sides.items()])
