"""Our decoder under torch's own data parallelism, in the loop that one would write."""

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from research import comm
from research.build import build
from research.config import RunConfig
from research.mesh import Group, Mesh
from research.models.batch import Batch
from research.models.decoder import Decoder
from research.train.optim import adamw


def fully_sharded(model: Decoder) -> nn.Module:
    """Each layer is a unit; the rest is another one, which torch keeps from forward to backward."""
    for layer in model.layers.values():
        fully_shard(layer)
    fully_shard(model)
    return model


PEERS: Mapping[str, Callable[[Decoder], nn.Module]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "fully_shard": fully_sharded,
}


class TorchTraining:
    """Steps of AdamW from our initial weights. The peers average gradients over ranks, of which each has as many
    tokens: so does the loss."""

    def __init__(self, config: RunConfig, peer: str, world: Group, device: torch.device) -> None:
        self.world, self.clip = world, config.train.clip
        model = build(config, Mesh({}), device).model
        self.model = PEERS[peer](model)
        self.parameters = list(model.parameters())
        self.optimizer = adamw(config.train, [(p, p.dim() > 1) for p in self.parameters])

    def step(self, batch: Batch) -> tuple[float, float]:
        """The loss before the step, and the norm of its gradient."""
        mine = batch.numbered().part(self.world.rank, self.world.size)
        loss = self.model(mine).loss / mine.targets.numel()
        loss.backward()
        norm = clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = comm.all_reduce_(loss.detach() / self.world.size, self.world, "loss")
        return mean.item(), (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
