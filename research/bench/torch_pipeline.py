"""A plain decoder under torch's own pipeline parallelism (`torch.distributed.pipelining`), with its own tensor
parallelism or without, in the loop that one would write. Stages are parts of the decoder of `torch_tensor.py`.

B batch, S tokens, D model, V vocabulary
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

from research.bench.torch_tensor import Decoder, decoder, plan
from research.config import RunConfig
from research.models.batch import Batch
from research.models.rope import Rotary, rotary
from research.train.optim import adamw


class Stage(nn.Module):
    """One of n equal parts of the layers, under the names that they have in the whole decoder."""

    def __init__(self, whole: Decoder, stage: int, n: int, turns: Rotary) -> None:
        super().__init__()
        each = len(whole.layers) // n
        self.first, self.last, self.turns = stage == 0, stage == n - 1, turns
        if self.first:
            self.embedding = whole.embedding
        self.layers = nn.ModuleDict({str(i): whole.layers[i] for i in range(stage * each, (stage + 1) * each)})
        if self.last:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: Tensor) -> Tensor:
        """Ids (B, S), or the residual stream (B, S, D) -> the stream, or logits (B, S, V)"""
        x = self.embedding(x) if self.first else x
        for layer in self.layers.values():
            x = layer(x, self.turns)
        return self.head(self.norm(x)) if self.last else x


class TorchPipeline:
    """Steps of AdamW from given whole weights, named as ours."""

    def __init__(self, config: RunConfig, weights: Mapping[str, Tensor], device: torch.device) -> None:
        n, tp = config.pp.degree, config.tp.degree
        mesh = init_device_mesh(device.type, (n, tp), mesh_dim_names=("pp", "tp"))
        stage = mesh.get_local_rank("pp")
        turns = rotary(torch.arange(config.data.sequence)[None], config.model, torch.float32)
        self.model = Stage(decoder(config.model, weights, device), stage, n, turns)
        if tp > 1:
            parts = {name for name, _ in self.model.named_children()}
            styles = {k: v for k, v in plan(config.tp.sequence).items() if k.partition(".")[0] in parts}
            parallelize_module(self.model, mesh["tp"], styles)
        self.optimizer = adamw(config.train, [(p, p.dim() > 1) for p in self.model.parameters()])
        part = PipelineStage(self.model, stage, n, device, group=mesh.get_group("pp"))
        self.schedule = Schedule1F1B(part, config.train.microbatches, loss_fn=mean_loss)

    def step(self, batch: Batch) -> Tensor:
        """The loss before the step where the last stage is, 0 elsewhere."""
        losses: list[Tensor] = []
        with loss_parallel():
            tokens = (batch.tokens,) if self.model.first else ()
            self.schedule.step(*tokens, target=batch.targets if self.model.last else None, losses=losses)
        self.optimizer.step()
        self.optimizer.zero_grad()
        whole = [loss.full_tensor() if isinstance(loss, DTensor) else loss for loss in losses]
        return torch.stack(whole).mean().detach() if whole else torch.zeros(())


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Microbatches count as many tokens each, so that the mean of their means is that of the batch."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
