"""A training step at tp=2 against the same model under torch's own tensor parallelism, on two processes.

Both take steps of AdamW on one batch, in float32, from equal weights: the loss of a later step tells whether gradients
and optimizer agree, too.
"""

from collections.abc import Iterator
from functools import partial

import torch

from research.bench.side_by_side import Case, RankedCase, Side, Values
from research.bench.torch_tensor import TorchTraining
from research.bench.workload import STEPS, TOLERANCE, batch_of, config_of, our_sides, sizes
from research.config import RunConfig, replace
from research.launch.process import Place
from research.mesh import Mesh
from research.train.loop import Trainer

RANKS = 2


def cases() -> Iterator[RankedCase]:
    for sequence in (True, False):
        tp = {"degree": RANKS, "sequence": sequence, "keep_gathered": sequence}  # torch keeps them, too
        config = config_of("tp", tp, clip=0.0)
        name = f"tp {RANKS}, {'sequence parallel' if sequence else 'repeated stream'}, {sizes(config)}"
        yield RankedCase(name, RANKS, config.launch, partial(case, config, name))


def case(config: RunConfig, name: str, place: Place, device: torch.device) -> Case:
    """This rank's part of both."""
    batch, mesh = batch_of(config), Mesh.from_config(config, place.world, place.rank)
    ours, plain = our_sides(config, mesh, device)
    whole = Trainer(replace(config, {"tp.degree": 1}), Mesh({}), device)
    other = TorchTraining(config, {n: weight for n, _, weight in whole.storage.weights()}, device)

    def run_theirs() -> Values:
        return {"losses": torch.stack([other.step(batch) for _ in range(STEPS)])}

    return Case(name, 1, TOLERANCE, ours, [Side("torch parallelize_module", run_theirs), plain])
