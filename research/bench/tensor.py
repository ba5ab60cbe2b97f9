"""A training step at tp=2 against the same model under torch's own tensor parallelism, on two processes.

Both take steps of AdamW on one batch, in float32, from equal weights: the loss of a later step tells whether gradients
and optimizer agree, too.
"""

from collections.abc import Iterator
from functools import partial

import torch

from research.bench.side_by_side import Case, RankedCase, Side, Values
from research.bench.torch_tensor import TorchTraining
from research.config import RunConfig, replace
from research.launch.process import Place
from research.mesh import Mesh
from research.models.batch import Batch
from research.settings import from_mapping
from research.train.loop import Trainer

RANKS, STEPS = 2, 2
TOLERANCE = 1e-5  # float32 sums in another order
MODEL = {"vocab": 4096, "dim": 256, "layers": 8, "heads": 8, "kv_heads": 4, "head_dim": 32, "ffn": 768, "experts": 0}
TRAIN = {"global_batch": 4, "steps": 10**6, "warmup_steps": 0, "schedule": "wsd", "clip": 0.0}
LENGTH = 512


def cases() -> Iterator[RankedCase]:
    for sequence in (True, False):
        tp = {"degree": RANKS, "sequence": sequence, "keep_gathered": sequence}  # torch keeps them, too
        config = from_mapping({"model": MODEL, "tp": tp, "data": {"sequence": LENGTH}, "train": TRAIN})
        sizes = f"{TRAIN['global_batch']} x {LENGTH} tokens, D {config.model.dim}, {config.model.layers} layers"
        name = f"tp {RANKS}, {'sequence parallel' if sequence else 'repeated stream'}, {sizes}"
        yield RankedCase(name, RANKS, config.launch, partial(case, config, name))


def case(config: RunConfig, name: str, place: Place, device: torch.device) -> Case:
    """This rank's part of both."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.model.vocab, (config.train.global_batch, LENGTH + 1), generator=generator)
    positions = torch.arange(LENGTH).expand(len(ids), -1)
    batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), positions, torch.zeros_like(positions))
    trainer = Trainer(config, Mesh.from_config(config, place.world, place.rank), device)
    whole = Trainer(replace(config, {"tp.degree": 1}), Mesh({}), device)
    other = TorchTraining(config, {n: weight for n, _, weight in whole.storage.weights()}, device)

    def run_ours() -> Values:
        losses = []
        for step in range(STEPS):
            sums = trainer.backward([batch])
            trainer.update(step, sums)
            losses.append(sums.totals[0])
        return {"losses": torch.stack(losses)}

    def run_theirs() -> Values:
        return {"losses": torch.stack([other.step(batch) for _ in range(STEPS)])}

    return Case(name, 1, TOLERANCE, Side("quintet", run_ours), [Side("torch parallelize_module", run_theirs)])
