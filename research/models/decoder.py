"""A LLaMA/DeepSeek-style decoder, written for one device.

B batch, S local sequence, D model, V vocabulary
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import nullcontext
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from research.config import ModelConfig
from research.models.attention import Attention
from research.models.batch import Batch
from research.models.layers import FeedForward, RMSNorm
from research.models.mla import LatentAttention
from research.models.moe import MoE
from research.models.mtp import Prediction
from research.models.params import Block, Spec
from research.models.recipes import selective
from research.models.recompute import Keep, decide, recomputed
from research.models.rope import Places, places

Parts = Collection[str] | None  # prefixes of parameter names; None: all


class Output(NamedTuple):
    """This rank's part of each. `loss`: cross-entropy summed over counted tokens, nats. `aux`: auxiliary losses.
    `ahead`: as `loss`, by depth of multi-token prediction. What a part of the model does not compute is 0."""

    loss: Tensor
    aux: Tensor
    ahead: tuple[Tensor, ...] = ()
    hidden: Tensor | None = None  # (B, S, D) of a part of the model that ends before the head

    @property
    def terms(self) -> tuple[Tensor, ...]:
        """All of them, in the order of `Denominators.shares`."""
        return (self.loss, self.aux, *self.ahead)


class Layer(nn.Module):
    """Residual block: attention, then a dense or an MoE feed-forward.

    pre       x + f(norm(x))         Xiong et al. 2020, section 3.1
    post      norm(x + f(x))         Vaswani et al. 2017, section 3.1
    output    x + norm(f(x))         OLMo 2, section 3.2
    sandwich  x + norm(f(norm(x)))   Ding et al. 2021, section 2.4
    """

    def __init__(self, c: ModelConfig, index: int) -> None:
        super().__init__()
        self.norm = c.norm
        first, last = c.norm in ("pre", "sandwich"), c.norm != "pre"
        self.attention_norm = RMSNorm(c.norm_eps, dim=c.dim) if first else nn.Identity()
        self.attention = attention_of(c, index)
        self.attention_out_norm = RMSNorm(c.norm_eps, dim=c.dim) if last else nn.Identity()
        self.ffn_norm = RMSNorm(c.norm_eps, dim=c.dim) if first else nn.Identity()
        self.ffn = MoE(c) if c.is_moe(index) else FeedForward(c, c.ffn, c.mlp_bias)
        self.ffn_out_norm = RMSNorm(c.norm_eps, dim=c.dim) if last else nn.Identity()

    def forward(self, x: Tensor, at: Places, keep: Keep) -> tuple[Tensor, Tensor]:
        x = self._added(x, self.attention(self.attention_norm(x), at), self.attention_out_norm)
        h = self.ffn_norm(x)
        if isinstance(self.ffn, MoE):
            y, aux = self.ffn(h, at, keep)
        else:
            y, aux = self.ffn(h), torch.zeros((), device=x.device)
        return self._added(x, y, self.ffn_out_norm), aux

    def _added(self, x: Tensor, y: Tensor, norm: nn.Module) -> Tensor:
        out: Tensor = norm(x + y) if self.norm == "post" else x + norm(y)
        return out


class Embedding(Block):
    """(B, S) token ids -> (B, S, D)"""

    weight: nn.Parameter

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.param("weight", vocab=c.vocab, dim=c.dim, std=c.init_std)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.seams.lookup(self.weight, tokens)


class Head(Block):
    """(B, S, D), (B, S) targets -> sum of cross-entropy. A tied head is given the embedding's weight. What it is given
    has passed `norm`, or that of a depth of multi-token prediction."""

    weight: nn.Parameter

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(c.norm_eps, dim=c.dim)
        if not c.tied:
            self.param("weight", vocab=c.vocab, dim=c.dim, std=c.init_std)

    def forward(self, x: Tensor, targets: Tensor, tied: Tensor | None) -> Tensor:
        return self.seams.cross_entropy(x, self.weight if tied is None else tied, targets)

    def logits(self, x: Tensor, rows: Tensor, tied: Tensor | None) -> Tensor:
        """(B, S, D), numbers (n,) of tokens among the B*S -> (n, V)"""
        return self.seams.logits(x, self.weight if tied is None else tied, rows)


class Decoder(nn.Module):
    """Batch -> Output. Parts stand in the order of forward: their gradients arrive in the reverse one.

    A model may hold some of its parts alone, under the names that they have in the whole one.
    """

    def __init__(
        self, c: ModelConfig, recompute: Literal["none", "selective", "full"] = "none", parts: Parts = None
    ) -> None:
        """`parts`: those that exist, of `embedding, layers.0, .., head, mtp`; None: all."""
        super().__init__()
        self.c, self.recompute = c, recompute
        if holds(parts, "embedding"):
            self.embedding = Embedding(c)
        self.layers = nn.ModuleDict({str(i): Layer(c, i) for i in range(c.layers) if holds(parts, f"layers.{i}")})
        if holds(parts, "head"):
            self.head = Head(c)
        depths = range(1, c.mtp_depth + 1) if holds(parts, "mtp") else ()
        self.mtp = nn.ModuleDict({str(k): Prediction(c, Layer(c, c.layers - 1)) for k in depths})

    def forward(self, batch: Batch, x: Tensor | None = None, parts: Parts = None) -> Output:
        """Those of `parts` that exist, one after the other, from `x` (B, S, D), which the part before the first of them
        has given, or from the batch's tokens. A batch without `ahead` (an evaluation) is not predicted further than one
        token."""
        x, aux, at = self.stream(batch, x, parts)
        if not holds(parts, "head"):
            nothing = torch.zeros((), device=x.device, requires_grad=True)
            return Output(nothing, aux, (nothing,) * len(batch.ahead), x)
        h = self.head.norm(x)
        loss, losses = self.head(h, batch.targets, self.tied), []
        for depth, ahead in zip(self.mtp.values(), batch.ahead, strict=bool(batch.ahead)):
            h, part = self._run(depth, at, h, self.embedding(ahead.tokens))
            aux = aux + part
            losses.append(self.head(h, ahead.targets, self.tied))
        return Output(loss, aux, tuple(losses))

    def logits(self, batch: Batch, rows: Tensor, x: Tensor | None = None, parts: Parts = None) -> Tensor:
        """What follows the tokens with these numbers (n,) among the B*S of the batch: (n, V). As `forward` in all else,
        to the head."""
        return self.head.logits(self.head.norm(self.stream(batch, x, parts)[0]), rows, self.tied)

    def stream(self, batch: Batch, x: Tensor | None = None, parts: Parts = None) -> tuple[Tensor, Tensor, Places]:
        """The residual stream after these layers (B, S, D), their auxiliary losses, and where the tokens stand."""
        x = self.embedding(batch.tokens) if x is None else x
        at = places(batch, self.c, x.dtype)
        aux = torch.zeros((), device=x.device, requires_grad=True)
        for i, layer in self.layers.items():
            if holds(parts, f"layers.{i}"):
                x, part = self._run(layer, at, x)
                aux = aux + part
        return x, aux, at

    @property
    def tied(self) -> Tensor | None:
        """The weight of a head that has none of its own."""
        return self.embedding.weight if self.c.tied else None

    def _run(self, layer: nn.Module, at: Places, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        if self.recompute == "full":
            return recomputed(lambda keep, *inputs: layer(*inputs, at, keep), *inputs)
        with selective() if self.recompute == "selective" else nullcontext():
            out: tuple[Tensor, Tensor] = layer(*inputs, at, decide)
            return out


def holds(parts: Parts, part: str) -> bool:
    return parts is None or part in parts


def names_of(parts: Parts, names: Iterable[str]) -> Iterator[str]:
    """Those of the parameters that belong to these parts."""
    return (n for n in names if parts is None or any(n.startswith(f"{part}.") for part in parts))


def attention_of(c: ModelConfig, layer: int) -> Attention | LatentAttention:
    kind = LatentAttention if c.attention == "mla" else Attention
    return kind(c, c.window_of(layer))


def specs(model: nn.Module) -> dict[str, Spec]:
    """Declarations of all parameters by full name, in the order of definition."""
    return {
        f"{path}.{name}".lstrip("."): spec
        for path, module in model.named_modules()
        if isinstance(module, Block)
        for name, spec in module.specs.items()
    }


def active_parameters(c: ModelConfig, declared: dict[str, Spec]) -> int:
    """Parameters that one token meets: all, less the routed experts that it is not sent to."""
    idle = sum(s.numel * (c.experts - c.top_k) // c.experts for s in declared.values() if "expert" in s.dims)
    return sum(s.numel for s in declared.values()) - idle
