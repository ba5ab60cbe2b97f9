"""Peak memory of a step on one rank of a layout, without starting any: `train/memory.py` under the fake process group.

Sizes are those of a run with ranks. Values are not, so that experts must not be shared: their load would be any.
A backend may keep what is sent a little longer than the fake one (`communication`).
"""

from collections.abc import Mapping

import pandas as pd
import torch

from research.config import RunConfig
from research.data.tokens import open_tokens
from research.launch.process import Place, fake_process_group, threads
from research.mesh import Mesh, total_ranks
from research.train.loop import Trainer
from research.train.memory import peak_bytes
from research.train.optim import make_moments
from research.train.run import global_batches

MIB = 2**20


def peak(config: RunConfig, rank: int = 0) -> dict[str, int]:
    """Bytes by category in the fullest moment of a step."""
    world = total_ranks(config)
    torch.set_num_threads(threads(Place(rank, world, rank, world), config.launch))
    batches = global_batches(config, open_tokens(config.data))
    with fake_process_group(world, rank):
        trainer = Trainer(config, Mesh.from_config(config, world, rank, fake=True), torch.device("cpu"))
        make_moments(trainer.storage.optimizer)  # as after a first step
        return peak_bytes(trainer, batches.microbatches_of(0))


def dry_peaks(configs: Mapping[str, RunConfig], rank: int = 0) -> pd.DataFrame:
    """MiB: a line for each named config, a column for each category that any of them has."""
    table = pd.DataFrame({name: peak(config, rank) for name, config in configs.items()}).T.rename_axis("layout") / MIB
    return table.loc[:, table.any()]
