"""The arithmetic that is worth more than one line of torch: embedding, attention, loss, permutation of rows."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from research.models.products import linear, weight_gradient
from research.models.recipes import recipe_of


def embed(weight: Tensor, ids: Tensor) -> Tensor:
    """(V, D), (B, S) -> (B, S, D). The gradient of a row adds up in float32: a frequent token has thousands of terms,
    and a sum of bfloat16 stops growing at 256 of them."""
    y: Tensor = _Embed.apply(weight, ids)
    return y


class _Embed(torch.autograd.Function):
    """
    forward   (V, D), (B, S) -> (B, S, D)   y = w[ids]
    backward  (B, S, D) -> (V, D)           dw[ids] += dy
    """

    @staticmethod
    def forward(ctx, weight: Tensor, ids: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(ids)
        ctx.rows, ctx.dtype = len(weight), weight.dtype
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
        (ids,) = ctx.saved_tensors
        wide = torch.float32 if dy.dtype == torch.bfloat16 else dy.dtype
        dw = torch.zeros(ctx.rows, dy.shape[-1], dtype=wide, device=dy.device)
        dw.index_add_(0, ids.flatten(), dy.flatten(0, -2).to(wide))
        return dw.to(ctx.dtype), None


def flash_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 0) -> Tensor:
    """As `causal_attention`, by the flash-attn package: CUDA, bfloat16. It wants v as wide as q: zeros do that."""
    from flash_attn import flash_attn_func  # an extra that exists with CUDA only

    left_and_right = (window - 1, 0) if window else (-1, -1)
    width = v.shape[-1]
    v = F.pad(v, (0, q.shape[-1] - width))
    o: Tensor = flash_attn_func(q, k, v, softmax_scale=scale, causal=True, window_size=left_and_right)
    return o[..., :width]


def flash_attn_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """q (B, H, S, h), k and v (B, G, T, h) -> output (B, H, S, h) and log-sum-exp (B, H, S), by flash-attn."""
    from flash_attn.flash_attn_interface import _flash_attn_forward

    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    o, lse, *_ = _flash_attn_forward(q, k, v, 0.0, scale, causal, -1, -1, 0.0, None, False)
    return o.transpose(1, 2), lse


def flash_attn_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, in their shapes."""
    from flash_attn.flash_attn_interface import _flash_attn_backward

    do, q, k, v, o = (t.transpose(1, 2) for t in (do, q, k, v, o))
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    about = 0.0, scale, causal, -1, -1, 0.0, None, False
    _flash_attn_backward(do.contiguous(), q, k, v, o, lse.contiguous(), dq, dk, dv, *about)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 0, documents: Tensor | None = None
) -> Tensor:
    """q (B, S, H, h), k (B, S, G, h), v (B, S, G, v) -> (B, S, H, v); query head i reads kv head i * G // H. With a
    window a token sees that many tokens, itself included; with documents (B, S) those of its own alone."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    seen = None
    if 0 < window < q.shape[2] or documents is not None:
        place = torch.arange(q.shape[2], device=q.device)
        distance = place[:, None] - place
        seen = (distance >= 0) & (distance < (window or len(place)))
        if documents is not None:
            seen = seen & (documents[:, None, :, None] == documents[:, None, None])
    grouped = q.shape[1] != k.shape[1]
    if (
        grouped and seen is not None
    ):  # with a mask, torch has grouped heads in no kernel of CUDA but one that keeps S x S
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        grouped = False
    o = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None, scale=scale, enable_gqa=grouped)
    return o.transpose(1, 2)


CHUNK = 2**25  # logits at a time, 128 MiB of float32, or more where the gradient of the head is as large anyway


def cross_entropy(
    x: Tensor,
    head: Tensor,
    targets: Tensor,
    low: int = 0,
    high: int | None = None,
    largest: Callable[[Tensor], Tensor] = lambda t: t,
    total: Callable[[Tensor], Tensor] = lambda t: t,
) -> Tensor:
    """x (N, D), head (V, D), targets (N,) -> sum of the cross-entropy of those targets that are not negative, nats.

    `head` may be a part of a larger one: its rows begin at `low`, and those from `high` on are padding. `largest` and
    `total` then reduce (.., n) over the ranks that hold the parts: each computes the same sum, and the gradients are
    those through its own rows. All ranks hold as many rows, so that they take as many tokens at a time.
    """
    # Each time, that gradient (V, D) is read and written: of too few tokens it would be most of the work.
    tokens = max(1, CHUNK // len(head), x.shape[-1] // 2)
    if high is not None:
        head = head[: max(0, min(len(head), high - low))]
    y: Tensor = _CrossEntropy.apply(x, head, targets, low, tokens, torch.is_grad_enabled(), largest, total)
    return y


class _CrossEntropy(torch.autograd.Function):
    """A few tokens at a time, so that logits never exist at once; their gradient is used up where they are, as Liger
    Kernel does (Hsu et al. 2024, section 3.2), and waits for the factor that backward brings. In bfloat16 dx is rounded
    before that factor and after it, so that all of it may be off by one part in 512.

    forward    logits (n, V) = x head^T;  loss += log sum exp(logits) - logits[target]
               dlogits = softmax - onehot;  dx (n, D) = dlogits head;  dhead (V, D) += dlogits^T x
    backward   dx, dhead times dloss
    """

    @staticmethod
    def forward(ctx, x, head, targets, low, tokens, wanted, largest, total):  # type: ignore[no-untyped-def]
        wide = torch.promote_types(x.dtype, torch.float32)
        dx = torch.empty_like(x) if wanted else None
        dhead = torch.zeros_like(head, dtype=wide) if wanted else None
        loss = x.new_zeros((), dtype=wide)
        for at in (slice(i, i + tokens) for i in range(0, len(x), tokens)):
            here, own = x[at], targets[at] - low
            e = linear(here, head).to(wide)
            top = e.amax(-1) if len(head) else e.new_full((len(e),), -torch.inf)
            e.sub_(largest(top)[:, None])
            mine = ((own >= 0) & (own < len(head)))[:, None]
            own = own[:, None].where(mine, 0)
            hit = e.gather(-1, own).where(mine, 0) if len(head) else e.new_zeros(len(e), 1)
            e.exp_()
            sums, hits = total(torch.stack([e.sum(-1), hit[:, 0]]))
            counted = targets[at] >= 0
            loss += ((sums.log() - hits) * counted).sum()
            if dx is not None and dhead is not None:
                e.mul_((counted / sums)[:, None])
                if len(head):
                    e.scatter_(-1, own, e.gather(-1, own) - mine.to(wide) * counted[:, None])
                e = e.to(x.dtype)
                dx[at] = linear(e, head.T)
                dhead.add_(weight_gradient(e, here))
            del e  # the next ones are not to be made beside them
        if wanted:
            ctx.save_for_backward(dx, dhead)
        return loss

    @staticmethod
    def backward(ctx, dloss):  # type: ignore[no-untyped-def]
        dx, dhead = ctx.saved_tensors
        return (dx * dloss.view(1, 1)).to(dx.dtype), (dhead * dloss).to(dx.dtype), *[None] * 6


def spread(x: Tensor, index: Tensor, places: Tensor, starts: Tensor | None = None) -> Tensor:
    """x (T, D) -> x[index] (N, D). `places` (N,) says where the copies of each row of x stand, row after row; those of
    row t begin at starts[t], or there is one of each (N = T). Both directions read by index alone: no atomics."""
    y: Tensor = _Spread.apply(x, None, index, places, starts)
    return y


def spread_beside(x: Tensor, beside: Tensor, index: Tensor, places: Tensor, starts: Tensor) -> Tensor:
    """As `spread`, with `beside` (N,) for one more column: (N, D + 1)."""
    y: Tensor = _Spread.apply(x, beside, index, places, starts)
    return y


def collect(y: Tensor, index: Tensor, places: Tensor, starts: Tensor) -> Tensor:
    """The adjoint of `spread`: y (N, D) -> (T, D), the sum over the copies of each row, zeros where there are none."""
    x: Tensor = _Collect.apply(y, index, places, starts)
    return x


def _sums(y: Tensor, places: Tensor, starts: Tensor | None) -> Tensor:
    return y.index_select(0, places) if starts is None else F.embedding_bag(places, y, starts, mode="sum")


class _Spread(torch.autograd.Function):
    """`beside` (N,), where it is given, is one more column of y. Such a y travels and nothing saves it: no recipe.

    forward   (T, D) -> (N, D)   y = x[index]
    backward  (N, D) -> (T, D)   dx[t] = sum over the copies of row t of dy
    """

    @staticmethod
    def forward(ctx, x: Tensor, beside: Tensor | None, index: Tensor, places: Tensor, starts: Tensor | None) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.where, ctx.has_beside = (places, starts), beside is not None
        if beside is not None:
            y = F.pad(x, (0, 1)).index_select(0, index)
            y[:, -1] = beside
            return y
        if source := recipe_of(x):
            ctx.again = lambda ctx: source().index_select(0, index)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
        dx = _sums(dy, *ctx.where)
        return (dx[:, :-1], dy[:, -1], *[None] * 3) if ctx.has_beside else (dx, *[None] * 4)


class _Collect(torch.autograd.Function):
    """Its index is no saved tensor, so that recompute need not run as far as this for it.

    forward   (N, D) -> (T, D)   x[t] = sum over the copies of row t of y
    backward  (T, D) -> (N, D)   dy = dx[index]
    """

    @staticmethod
    def forward(ctx, y: Tensor, index: Tensor, places: Tensor, starts: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.index = index
        return _sums(y, places, starts)

    @staticmethod
    def backward(ctx, dx: Tensor):  # type: ignore[no-untyped-def]
        return dx.index_select(0, ctx.index), None, None, None
