"""Mixture of experts: a router, fine-grained experts, shared experts.

B batch, S local sequence, D model, E experts, K top-k, F expert width, T = B*S tokens, N = rows sent to experts
"""

import math
from fractions import Fraction

import torch
from torch import Tensor, nn

from research.config import ModelConfig
from research.models.layers import FeedForward, residual_std
from research.models.params import Block
from research.models.pointwise import cast, weighted_swiglu
from research.models.products import Products
from research.models.recompute import Keep
from research.models.rope import Places
from research.models.seams import count

AT_ONCE = Products()  # never puts a weight gradient off: a router's is small, and its input need not wait for it
TINY = 1e-20  # sigmoids may all underflow: such a token has weights of 0, not of 0/0


class MoE(Block):
    """x (B, S, D) -> (B, S, D) and this rank's part of the auxiliary losses.

    Both auxiliary losses are sums over local tokens divided by the token count of the whole global microbatch, so the
    parts of all ranks add up to the loss of one device.

    `bias` (E,) is added to scores where experts are chosen, and never to weights: no gradient reaches it. The optimizer
    step moves it (`move_biases` in train/optim.py) by `counted`: (2, E) for each global microbatch since the last one,
    how often each expert was chosen, and how many of these choices its capacity dropped.
    """

    router: nn.Parameter
    bias: nn.Parameter
    w_gate: nn.Parameter
    w_up: nn.Parameter
    w_down: nn.Parameter

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        E, D, width = c.experts, c.dim, c.expert_ffn
        self.param("router", router_out=E, dim=D, std=c.init_std, keep_float32=True)
        if c.bias_rate:
            self.param("bias", router_out=E, std=0.0, keep_float32=True, trained=False)
        self.counted: list[Tensor] = []
        self.param("w_gate", expert=E, expert_ffn=width, dim=D, std=c.init_std)
        self.param("w_up", expert=E, expert_ffn=width, dim=D, std=c.init_std)
        self.param("w_down", expert=E, dim=D, expert_ffn=width, std=residual_std(c))
        self.shared = FeedForward(c, c.shared_experts * width) if c.shared_experts else None

    def forward(self, x: Tensor, at: Places, keep: Keep) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        # Scores are compared in the router's own precision: in bfloat16 close ones tie and pick other experts.
        logits = AT_ONCE.linear(cast(tokens, self.router.dtype), self.router)
        scores = logits.softmax(-1) if self.c.router_score == "softmax" else logits.sigmoid()
        ids = keep(lambda: self.choose(scores.detach(), at))
        counts = keep(lambda: self.count(ids, at.whole_tokens))
        weights = scores.gather(-1, ids)
        if self.c.normalize_weights:
            weights = weights / (weights.sum(-1, keepdim=True) + TINY)
        weights = weights * self.c.weight_scale
        aux = self.auxiliary(logits, scores, counts, keep(lambda: self.share(ids.unflatten(0, x.shape[:2]), counts)))
        if self.c.capacity:
            kept = keep(lambda: self.kept(ids, weights.detach(), at))
            ids, weights = ids.where(kept, self.c.experts), weights * kept
        y, shared = self.seams.experts(
            tokens,
            ids,
            weights,
            self.c.experts,
            self.routed,
            lambda: self.shared(x) if self.shared else None,
            drops=self.c.capacity > 0,
            keep=keep,
        )
        y = y.view_as(x)
        return y if shared is None else y + shared, aux

    def choose(self, scores: Tensor, at: Places) -> Tensor:
        """scores (T, E) -> the chosen experts (T, K)"""
        if self.c.load != "routed":
            return forced(self.numbers(at), self.c)
        return choose(scores + self.bias if self.c.bias_rate else scores, self.c)

    def numbers(self, at: Places) -> Tensor:
        """(T,) of the tokens that are here, in the global microbatch."""
        assert at.numbers is not None, "a batch is numbered before it is cut"
        return self.seams.residual(at.numbers).flatten()

    def count(self, ids: Tensor, whole_tokens: int) -> Tensor:
        """ids (T, K) -> choices in the global microbatch (E,), remembered for the optimizer step but in evaluations."""
        counts = self.seams.count(ids, self.c.experts)
        if torch.is_grad_enabled():
            chosen = counts * (whole_tokens * self.c.top_k) // counts.sum().clamp(min=1)  # a repeated token once
            room = capacity(self.c, whole_tokens) if self.c.capacity else chosen
            self.counted.append(torch.stack([chosen, (chosen - room).clamp(min=0)]))
        return counts

    def kept(self, ids: Tensor, weights: Tensor, at: Places) -> Tensor:
        """ids and weights (T, K) -> the choices (T, K) that find room. All ranks decide on those of the whole global
        microbatch, so that a layout drops what one device drops."""
        numbers = self.numbers(at)
        ids = self.seams.assemble(ids, numbers, at.whole_tokens)
        if self.c.drop_by == "score":
            # Tokens with one history have one weight, which float64 tells apart by how a layout rounds: then number
            # decides.
            weights = self.seams.assemble(weights.float(), numbers, at.whole_tokens)
            first = weights.flatten().argsort(descending=True, stable=True)
        else:
            first = torch.arange(ids.numel(), device=ids.device)
        return within_capacity(ids, first, self.c.experts, capacity(self.c, at.whole_tokens))[numbers]

    def share(self, ids: Tensor, counts: Tensor) -> Tensor:
        """ids (B, S, K) -> each expert's share f of the choices that the balance loss is about: (1, E) of the global
        microbatch, or (B, E) of each sample."""
        if self.c.balance_scope == "sequence":
            counts = self.seams.count_each(ids, self.c.experts)
        counts = counts.to(self.router.dtype).view(-1, self.c.experts)  # integers would divide in float32
        return counts / counts.sum(-1, keepdim=True)

    def routed(self, rows: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
        """rows (N, D) sorted by expert, counts (E,), routing weights (N,) -> (N, D)"""
        product = self.seams.products.grouped
        hidden = weighted_swiglu(product(rows, self.w_gate, counts), product(rows, self.w_up, counts), weights)
        return product(hidden, self.w_down, counts)

    def auxiliary(self, logits: Tensor, scores: Tensor, counts: Tensor, share: Tensor) -> Tensor:
        """Balance E * sum_e f_e P_e over the batch (Switch Transformer, eq. 4-6) or the mean of those over each sample
        (DeepSeek-V3, eq. 17-20: P of scores that sum to 1; f is here of the choices as they were made, with bias and
        groups), and z-loss mean(logsumexp^2) (ST-MoE, eq. 5)."""
        tokens = counts.to(scores.dtype).sum() / self.c.top_k  # of the global microbatch: each chose top_k experts
        if self.c.router_score == "sigmoid":
            scores = scores / (scores.sum(-1, keepdim=True) + TINY)
        balance = self.c.experts * (share * scores.unflatten(0, (len(share), -1)).sum(1)).sum() / tokens
        z = logits.logsumexp(-1).square().sum() / tokens
        return self.c.balance * balance + self.c.z_loss * z


def capacity(c: ModelConfig, tokens: int) -> int:
    """Choices that one expert takes of a global microbatch of so many tokens (GShard, section 3.2; Switch Transformer,
    eq. 3): a multiple of its even share, rounded up."""
    return math.ceil(Fraction(str(c.capacity)) * tokens * c.top_k / c.experts)


def within_capacity(ids: Tensor, first: Tensor, n_experts: int, room: int) -> Tensor:
    """ids (T, K), the order (T*K,) in which choices are served -> whether each is among the first `room` of its expert
    (T, K)."""
    order = first[ids.flatten()[first].argsort(stable=True)]  # by expert, then as served
    counts = count(ids, n_experts)
    place = torch.arange(len(order), device=ids.device) - (counts.cumsum(0) - counts)[ids.flatten()[order]]
    return torch.empty_like(place, dtype=torch.bool).scatter_(0, order, place < room).view_as(ids)


def choose(scores: Tensor, c: ModelConfig) -> Tensor:
    """scores (T, E) -> the chosen experts (T, K), in the best groups only (DeepSeek-V2, section 2.2.2)."""
    if c.expert_groups > 1:
        grouped = scores.unflatten(-1, (c.expert_groups, -1))
        best = grouped.topk(c.group_best, -1).values.sum(-1).topk(c.top_groups, -1).indices
        closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
        scores = grouped.masked_fill(closed[..., None], -math.inf).flatten(-2)
    return scores.topk(c.top_k, -1).indices


def forced(numbers: Tensor, c: ModelConfig) -> Tensor:
    """numbers (T,) of tokens -> the experts (T, K) that `model.load` gives them: systematic sampling, which meets each
    expert's share of tokens (Madow 1949), by a low-discrepancy sequence of the numbers."""
    place = torch.arange(c.experts, dtype=torch.float64)
    if c.load == "worst":
        shares = (place < c.top_k).double()
    else:
        slope = min(1.0, c.experts / c.top_k - 1) if c.load == "skewed" else 0.0  # no share exceeds 1
        shares = c.top_k / c.experts * (1 + slope * (1 - 2 * place / max(c.experts - 1, 1)))
    starts = numbers.double()[:, None] * (5**0.5 - 1) / 2 % 1
    points = starts + torch.arange(c.top_k, device=numbers.device)
    ends = shares.cumsum(0).to(numbers.device)
    return torch.searchsorted(ends, points, right=True).clamp(max=c.experts - 1)
