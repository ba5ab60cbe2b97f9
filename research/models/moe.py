"""Mixture of experts: a router, fine-grained experts, shared experts.

B batch, S local sequence, D model, E experts, K top-k, F expert width, T = B*S tokens, N = rows sent to experts
"""

import torch.nn.functional as F
from torch import Tensor, nn

from research.config import ModelConfig
from research.models.layers import FeedForward, residual_std
from research.models.params import Block
from research.models.recompute import Keep


class MoE(Block):
    """x (B, S, D) -> (B, S, D) and this rank's part of the auxiliary losses.

    Both auxiliary losses are sums over local tokens divided by the token count of the whole global microbatch, so the
    parts of all ranks add up to the loss of one device.
    """

    router: nn.Parameter
    w_gate: nn.Parameter
    w_up: nn.Parameter
    w_down: nn.Parameter

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        E, D, width = c.experts, c.dim, c.expert_ffn
        self.param("router", router_out=E, dim=D, std=c.init_std, keep_float32=True)
        self.param("w_gate", expert=E, expert_ffn=width, dim=D, std=c.init_std)
        self.param("w_up", expert=E, expert_ffn=width, dim=D, std=c.init_std)
        self.param("w_down", expert=E, dim=D, expert_ffn=width, std=residual_std(c))
        self.shared = FeedForward(c, c.shared_experts * width) if c.shared_experts else None

    def forward(self, x: Tensor, keep: Keep) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        # Scores are compared in the router's own precision: in bfloat16 close ones tie and pick other experts.
        logits = F.linear(tokens.to(self.router.dtype), self.router)
        scores = logits.softmax(-1)
        ids = keep(lambda: scores.detach().topk(self.c.top_k, -1).indices)
        counts = keep(lambda: self.seams.count(ids, self.c.experts))
        weights = scores.gather(-1, ids)
        if self.c.normalize_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        y, shared = self.seams.experts(
            tokens, ids, weights, self.c.experts, self.routed, lambda: self.shared(x) if self.shared else None
        )
        y = y.view_as(x)
        return y if shared is None else y + shared, self.auxiliary(logits, scores, counts)

    def routed(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows (N, D) sorted by expert, counts (E,) -> (N, D)"""
        product = self.seams.products.grouped
        hidden = F.silu(product(rows, self.w_gate, counts)) * product(rows, self.w_up, counts)
        return product(hidden, self.w_down, counts)

    def auxiliary(self, logits: Tensor, scores: Tensor, counts: Tensor) -> Tensor:
        """Balance E * sum_e f_e P_e (Switch Transformer, eq. 4-6) and z-loss mean(logsumexp^2) (ST-MoE, eq. 5)."""
        counts = counts.to(scores.dtype)  # integers would divide in float32, in a float64 run too
        chosen = counts.sum()
        tokens = chosen / self.c.top_k  # of the global microbatch: each was sent to top_k experts
        balance = self.c.experts * (counts / chosen * scores.sum(0)).sum() / tokens
        z = logits.logsumexp(-1).square().sum() / tokens
        return self.c.balance * balance + self.c.z_loss * z
