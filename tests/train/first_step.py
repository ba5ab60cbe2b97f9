"""The first step of a training on the ranks of its layout."""

from research.data.tokens import open_tokens
from research.launch.local import start
from research.mesh import Mesh, total_ranks
from research.train.loop import Trainer
from research.train.run import global_batches

LIMIT_S = 120.0


def on_ranks(config, body):
    """`body(trainer, microbatches)` on every rank, of the first step."""

    def rank(place, device):
        trainer = Trainer(config, Mesh.from_config(config, place.world, place.rank), device)
        return body(trainer, global_batches(config, open_tokens(config.data)).microbatches_of(0))

    return start(rank, total_ranks(config), config.launch, LIMIT_S)
