"""A plain decoder under torch's own ring attention, its gradients averaged by DDP.

`context_parallel` itself takes CUDA kernels only; what it consists of runs with any kernel that returns a log-sum-exp.

B batch, S tokens of one rank, H heads, G kv heads, h head dim
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _templated_ring_attention,
    _templated_ring_attention_backward,
)
from torch.nn.parallel import DistributedDataParallel

from research.bench.torch_tensor import decoder
from research.config import RunConfig
from research.models.batch import Batch
from research.models.rope import rotary
from research.train.optim import adamw


def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, H, S, h), (B, G, S, h) twice -> (B, H, S, h), causal; each rank holds two runs as far from the middle, which
    is what its load balancing expects."""
    o: Tensor = _TorchRing.apply(q.contiguous(), k.contiguous(), v.contiguous())
    return o


class _TorchRing(torch.autograd.Function):
    """What `context_parallel` puts in the place of the attention kernel and of its backward."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        o, lse = _templated_ring_attention(_world(), 2, kernel, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, do: Tensor):  # type: ignore[no-untyped-def]
        q, k, v, o, lse = ctx.saved_tensors
        given = do.contiguous(), "grad_out", q, k, v, o, lse
        return _templated_ring_attention_backward(_world(), 2, _kernel_backward, *given, True)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def _kernel_backward(query: Tensor, key: Tensor, value: Tensor, **about: object) -> tuple[Tensor, ...]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    given = about["grad_out"], query, key, value, about["out"], about["logsumexp"], 0.0, about["is_causal"]
    gradients: tuple[Tensor, ...] = kernel(*given)
    return gradients


class TorchRingTraining:
    """Steps of AdamW from given whole weights, named as ours."""

    def __init__(self, config: RunConfig, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self.config = config
        model = decoder(config.model, weights, device, ring)
        self.model = DistributedDataParallel(model)
        self.optimizer = adamw(config.train, [(p, p.dim() > 1) for p in model.parameters()])

    def step(self, batch: Batch) -> Tensor:
        """The loss before the step, of this rank's part of a batch whose parts are equal."""
        logits = self.model(batch.tokens, rotary(batch.positions, self.config.model, torch.float32))
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        return mean
