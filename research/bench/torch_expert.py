"""A plain decoder with experts over ranks, as one writes it from torch's parts: ranks tell each other how many rows
they send, rows travel by `all_to_all_single`, sorted by expert they pass a loop over the experts that are here, the
gradients of all else are averaged by DDP. The same function as `models/moe.py` with weights that sum to 1.

B batch, S tokens, D model, E experts, K top-k, T = B*S, n ranks, N rows that arrive
"""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from research.bench.torch_tensor import FeedForward, decoder
from research.config import ModelConfig, RunConfig
from research.models.batch import Batch
from research.models.rope import rotary
from research.train.optim import adamw


class Experts(nn.Module):
    """(B, S, D) -> (B, S, D). Each rank has as many experts, in their order."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.top_k, self.ranks = c.top_k, dist.get_world_size()
        self.router = nn.Linear(c.dim, c.experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(c.dim, c.expert_ffn) for _ in range(c.experts // self.ranks))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, ids = self.router(tokens).softmax(-1).topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        chosen = ids.flatten()
        order = chosen.argsort(stable=True)
        leaving = chosen.bincount(minlength=self.router.out_features)
        arriving = torch.empty_like(leaving)
        dist.all_to_all_single(arriving, leaving)
        sent, received = (n.view(self.ranks, -1).sum(1).tolist() for n in (leaving, arriving))
        of_token = order // self.top_k
        rows = sent_over(tokens[of_token], sent, received)
        rows = sent_over(self.computed(rows, arriving), received, sent)
        rows = rows * weights.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, of_token, rows).view_as(x)

    def computed(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows (N, D) that stand rank by rank, and of each rank expert by expert, counts (n*E/n,) -> (N, D)"""
        expert = torch.arange(len(self.experts), device=rows.device).repeat(self.ranks).repeat_interleave(counts)
        order = expert.argsort(stable=True)
        parts = rows[order].split(counts.view(self.ranks, -1).sum(0).tolist())
        y = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return torch.empty_like(y).index_copy(0, order, y)


def sent_over(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    """rows (N, D), of which rank i gets sent[i] -> (M, D), received[i] of rank i"""
    assert dist.group.WORLD is not None
    return all_to_all_single_autograd(rows, received, sent, dist.group.WORLD)


def held(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The weights of this rank, experts one by one."""
    for name, weight in weights.items():
        if weight.dim() < 3:
            yield name, weight
            continue
        layer, _, part = name.rpartition(".")
        mine = weight.chunk(dist.get_world_size())[dist.get_rank()]
        yield from ((f"{layer}.experts.{i}.{part}", one) for i, one in enumerate(mine))


class TorchExpertTraining:
    """Steps of clipped AdamW from given whole weights, named as ours. DDP leaves the experts alone."""

    def __init__(self, config: RunConfig, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self.config = config
        model = decoder(config.model, dict(held(weights)), device, ffn=Experts)
        named = dict(model.named_parameters())
        here = [name for name in named if ".experts." in name]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, here)
        self.model = DistributedDataParallel(model)
        self.experts = [named[name] for name in here]
        self.dense = [p for name, p in named.items() if name not in here]
        self.optimizer = adamw(config.train, [(p, p.dim() > 1) for p in named.values()])

    def step(self, batch: Batch) -> tuple[float, float]:
        """The loss before the step, and the norm of its gradient, by this rank's part of a batch whose parts are
        equal."""
        logits = self.model(batch.tokens, rotary(batch.positions, self.config.model, torch.float32))
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()
        self.share()
        norm = self.norm()
        clip_grads_with_norm_(self.model.parameters(), self.config.train.clip, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        return mean.item(), norm.item()

    def share(self) -> None:
        """Make the experts' gradients those of a mean over ranks, too."""
        for p in self.experts:
            if p.grad is not None:
                p.grad.div_(dist.get_world_size())

    def norm(self) -> Tensor:
        """Of the gradient of all experts and, once, of the rest."""
        dense, experts = (
            get_total_norm([p.grad for p in ps if p.grad is not None]).square() for ps in (self.dense, self.experts)
        )
        dist.all_reduce(experts)
        return (dense + experts).sqrt()
