"""The places where a model may need other ranks. Here: one device, no communication.

An axis supplies its own version of a seam (`claim`) or wraps whoever owns it (`wrap`); a model only ever calls the
attribute. A seam holds the communication *and* the product beside it, so that the two can overlap.

B batch, S local sequence, D model, H heads, G kv heads, h head dim, v of values, L latent of keys and values, R turned
elements of a head, V vocabulary, E experts, K top-k, T = B*S tokens
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from research.models import kernels
from research.models.kernels import causal_attention, collect, embed, flash_attention, spread, spread_beside
from research.models.pointwise import rms_norm
from research.models.products import Products
from research.models.recompute import Keep, decide

# rows (N, D) sorted by expert, counts (E,), routing weights (N,) -> weighted outputs (N, D)
Routed = Callable[[Tensor, Tensor, Tensor], Tensor]
Seam = Callable[..., object]


def lookup(weight: Tensor, tokens: Tensor) -> Tensor:
    """(V, D), (B, S) -> (B, S, D)"""
    return embed(weight, tokens)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int = 0,
    documents: Tensor | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """(B, S, H, h), (B, S, G, h), (B, S, G, v), (B, S) -> (B, S, H, v); a token sees those up to its own, or the last
    `window` of them where that is not 0, and where `documents` (B, S) are given those of its own document alone. One
    device holds whole samples in order: positions decide nothing here, nor do `starts` (of the whole `Batch`)."""
    return causal_attention(q, k, v, scale, window, documents)


def attend_latent(q: Tensor, latent: Tensor, key: Tensor, up: Tensor, expanded: Callable[..., Tensor]) -> Tensor:
    """q (B, S, H, h), latents (B, S, L), turned keys (B, S, 1, R) -> (B, S, H, v), as `expanded(q, latent, key)` gives
    it: by keys and values that `up` (H (h - R + v), L) makes of the latents, and `attend`."""
    return expanded(q, latent, key)


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    n_experts: int,
    routed: Routed,
    shared: Callable[[], Tensor | None],
    drops: bool = False,
    keep: Keep = decide,
) -> tuple[Tensor, Tensor | None]:
    """x (T, D), ids and weights (T, K) -> weighted sum of the chosen experts (T, D), and what `shared()` returns. Where
    it `drops`, a choice of `n_experts` goes nowhere and adds nothing. Who goes where is decided in `keep`."""
    choices = keep(lambda: by_expert(ids, n_experts, drops))
    y = routed(choices.rows(x), choices.counts, choices.weights(weights.to(x.dtype)))
    return choices.sums(y), shared()


@dataclass(frozen=True)
class Choices:
    """N choices that tokens made of E experts, expert after expert. T tokens made K each, numbered token after token,
    of which some may be dropped: N <= T*K."""

    counts: Tensor  # (E,) of each expert
    order: Tensor  # (N,) the number of each
    index: Tensor  # (N,) the token of each
    places: Tensor  # (N,) where each stands in `order`, token after token
    starts: Tensor  # (T,) where those of each token begin in `places`

    def rows(self, x: Tensor) -> Tensor:
        """x (T, D) of tokens -> (N, D) of choices."""
        return spread(x, self.index, self.places, self.starts)

    def weighted_rows(self, x: Tensor, weights: Tensor) -> Tensor:
        """x (T, D) and weights (T, K) of tokens -> (N, D + 1) of choices, the weight of each behind its row."""
        return spread_beside(x, self.weights(weights), self.index, self.places, self.starts)

    def weights(self, weights: Tensor) -> Tensor:
        """weights (T, K) -> (N,)"""
        return weights.flatten().index_select(0, self.order)

    def sums(self, y: Tensor) -> Tensor:
        """y (N, D) of choices -> (T, D): the sum over those of each token."""
        return collect(y, self.index, self.places, self.starts)


def by_expert(ids: Tensor, n_experts: int, drops: bool) -> Choices:
    """ids (T, K) -> the choices of experts 0 to E - 1; where it `drops`, `n_experts` is none of them."""
    counts = count(ids, n_experts + 1)[:n_experts]
    # How many are kept is known on the device only: of all paths on one device this one alone makes the host wait.
    return sorted_choices(ids, counts, int(counts.sum()) if drops else ids.numel())


def sorted_choices(ids: Tensor, counts: Tensor, kept: int) -> Choices:
    """ids (T, K), of which those below E count, counts (E,) with sum `kept`."""
    each = ids.shape[1]
    order = ids.flatten().argsort(stable=True)[:kept]
    if kept == ids.numel():
        starts = torch.arange(0, kept, each, device=ids.device)
        return Choices(counts, order, order // each, inverse(order), starts)
    of_token = (ids < len(counts)).sum(1)
    return Choices(counts, order, order // each, order.argsort(), of_token.cumsum(0) - of_token)


def inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def cross_entropy(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """(B, S, D), (V, D), (B, S) -> this rank's part of the sum over counted tokens (targets >= 0), nats; the softmax is
    float32 at least."""
    return kernels.cross_entropy(x.flatten(0, 1), head, targets.flatten())


def logits(x: Tensor, head: Tensor, rows: Tensor) -> Tensor:
    """x (B, S, D), head (V, D) -> (n, V) of the tokens with these numbers (n,) among the B*S."""
    return F.linear(x.flatten(0, 1)[rows], head)


def count(ids: Tensor, n_experts: int) -> Tensor:
    """ids (T, K) -> how often each expert was chosen (E,). As a seam: over the whole global microbatch."""
    return torch.zeros(n_experts, dtype=torch.int64, device=ids.device).scatter_add_(
        0, ids.flatten(), torch.ones_like(ids.flatten())
    )


def count_each(ids: Tensor, n_experts: int) -> Tensor:
    """ids (B, S, K) -> how often each expert was chosen in each sample (B, E). As a seam: by all of its tokens."""
    flat = ids.flatten(1)
    zeros = torch.zeros(len(ids), n_experts, dtype=torch.int64, device=ids.device)
    return zeros.scatter_add_(1, flat, torch.ones_like(flat))


def assemble(values: Tensor, numbers: Tensor, whole: int) -> Tensor:
    """values (T, K), none below 0, of the tokens with these numbers (T,) -> (whole, K) of all tokens of the global
    microbatch, by number. No gradient."""
    return torch.zeros(whole, values.shape[1], dtype=values.dtype, device=values.device).index_copy_(0, numbers, values)


def residual(t: Tensor) -> Tensor:
    """(B, S) of each token of the batch -> (B, S') of those whose residual stream is here."""
    return t


def normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x (B, S, H*h) with weight (H*h,), over all heads. As a seam: over those of other ranks, too."""
    return rms_norm(x, weight, eps)


@dataclass(frozen=True)
class Seams:
    """What a model calls. `products` are the matrix products of column, row and the experts."""

    products: Products
    column: Callable[..., list[Tensor]]  # x (B, S, D), weights (O, D) -> one (B, S', O/tp) each
    row: Callable[[Tensor, Tensor], Tensor]  # x (B, S', I/tp), weight (D, I/tp) -> (B, S, D)
    lookup: Callable[[Tensor, Tensor], Tensor] = lookup
    attend: Callable[..., Tensor] = attend
    attend_latent: Callable[..., Tensor] = attend_latent
    experts: Callable[..., tuple[Tensor, Tensor | None]] = experts
    cross_entropy: Callable[[Tensor, Tensor, Tensor], Tensor] = cross_entropy
    logits: Callable[[Tensor, Tensor, Tensor], Tensor] = logits
    count: Callable[[Tensor, int], Tensor] = count
    count_each: Callable[[Tensor, int], Tensor] = count_each
    assemble: Callable[[Tensor, Tensor, int], Tensor] = assemble
    residual: Callable[[Tensor], Tensor] = residual
    normalize: Callable[[Tensor, Tensor, float], Tensor] = normalize


def attend_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int = 0,
    documents: None = None,
    starts: None = None,
) -> Tensor:
    """`attend` with the flash-attn kernel."""
    return flash_attention(q, k, v, scale, window)


def one_device(products: Products, flash: bool = False) -> Seams:
    def column(x: Tensor, *weights: Tensor) -> list[Tensor]:
        return [products.linear(x, w) for w in weights]

    return Seams(products, column, products.linear, attend=attend_flash if flash else attend)


def wire(
    seams: Seams, claims: Mapping[str, Mapping[str, Seam]], wraps: Sequence[Mapping[str, Callable[[Seam], Seam]]] = ()
) -> Seams:
    """Give each claimed seam to its one owner ({owner: {seam: function}}), then wrap in order.

    Raises ValueError where two owners claim one seam, or where no seam has that name.
    """
    known = {f.name for f in dataclasses.fields(Seams)} - {"products"}
    owners: dict[str, str] = {}
    for owner, functions in claims.items():
        for name in functions:
            if name not in known:
                raise ValueError(f"{owner} claims seam {name!r}; legal: {', '.join(sorted(known))}")
            if name in owners:
                raise ValueError(f"seam {name!r} is claimed by both {owners[name]} and {owner}")
            owners[name] = owner
        seams = _with(seams, functions)
    for wrap in wraps:
        seams = _with(seams, {name: w(getattr(seams, name)) for name, w in wrap.items()})
    return seams


def _with(seams: Seams, functions: Mapping[str, Any]) -> Seams:
    return dataclasses.replace(seams, **functions)
