"""What the benches of whole training steps share: a decoder, its optimisation, one batch, and our side of the steps."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from research.bench.side_by_side import RankedCase, RankedSide, Values
from research.config import RunConfig
from research.launch.process import Place
from research.mesh import Mesh, total_ranks
from research.models.batch import Batch
from research.settings import from_mapping
from research.train.loop import Trainer

STEPS = 2  # the loss of a later one tells whether gradients and optimizer agree, too
TOLERANCE = 1e-5  # float32 sums in another order
MODEL = {"vocab": 4096, "dim": 256, "layers": 8, "heads": 8, "kv_heads": 4, "head_dim": 32, "ffn": 768, "experts": 0}
TRAIN = {"global_batch": 4, "steps": 10**6, "warmup_steps": 0, "schedule": "wsd"}
LENGTH = 512


def config_of(axis: str, keys: Mapping[str, object], **train: object) -> RunConfig:
    """The workload with one axis on."""
    return from_mapping({"model": MODEL, axis: keys, "data": {"sequence": LENGTH}, "train": {**TRAIN, **train}})


def sizes(config: RunConfig) -> str:
    c, tokens = config.model, f"{config.train.global_batch} x {config.data.sequence} tokens"
    return f"{tokens}, D {c.dim}, {c.layers} layers"


def batch_of(config: RunConfig) -> Batch:
    """One global batch of random tokens."""
    length = config.data.sequence
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.model.vocab, (config.train.global_batch, length + 1), generator=generator)
    positions = torch.arange(length).expand(len(ids), -1)
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), positions, torch.zeros_like(positions))


def training(config: RunConfig, place: Place, device: torch.device) -> Callable[[], Values]:
    """Our steps on this rank: their losses, and the norm that clips."""
    mesh = Mesh.from_config(config, place.world, place.rank)
    batch, trainer = batch_of(config), Trainer(config, mesh, device)
    if config.train.clip:
        return lambda: values_of(steps_of(trainer, batch))
    return lambda: {"losses": losses_of(trainer, batch)}


def beside(config: RunConfig, name: str, *others: RankedSide) -> RankedCase:
    """Our steps beside others, and beside the same with torch's products."""
    ours = RankedSide("quintet", partial(training, config))
    return RankedCase(name, total_ranks(config), config.launch, TOLERANCE, ours, [*others, ours.by_torch()])


def losses_of(trainer: Trainer, batch: Batch) -> Tensor:
    """Those of our steps (STEPS,), without waiting for them."""
    n, losses = trainer.config.train.microbatches, []
    microbatches = [batch.part(m, n) for m in range(n)]
    for step in range(STEPS):
        sums = trainer.backward(microbatches)
        trainer.update(step, sums)
        losses.append(sums.totals[0])
    return torch.stack(losses)


def steps_of(trainer: Trainer, batch: Batch) -> list[tuple[float, float]]:
    """Of each of our steps the loss before it, and the norm of its gradient."""
    steps = (trainer.update(step, trainer.backward([batch]))[0] for step in range(STEPS))
    return [(loss, norm) for loss, _, norm in steps]


def values_of(steps: Sequence[tuple[float, float]]) -> Values:
    """What must agree. Of the norms the first one: AdamW divides small gradients by themselves, so that later ones tell
    of rounding."""
    losses, norms = torch.tensor(steps).unbind(1)
    return {"losses": losses, "norm": norms[:1]}
