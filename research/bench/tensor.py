"""A training step at tp=2 against the same model under torch's own tensor parallelism, on two processes.

Both take steps of AdamW on one batch, in float32, from equal weights: the loss of a later step tells whether gradients
and optimizer agree, too.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from research.bench.side_by_side import RankedCase, RankedSide, Values
from research.bench.torch_tensor import TorchTraining
from research.bench.workload import STEPS, batch_of, beside, config_of, sizes
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
        yield beside(config, name, RankedSide("torch parallelize_module", partial(torchs, config)))


def torchs(config: RunConfig, place: Place, device: torch.device) -> Callable[[], Values]:
    """Their steps on this rank."""
    whole = Trainer(replace(config, {"tp.degree": 1}), Mesh({}), device)
    training = TorchTraining(config, {n: weight for n, _, weight in whole.storage.weights()}, device)
    batch = batch_of(config)
    return lambda: {"losses": torch.stack([training.step(batch) for _ in range(STEPS)])}
