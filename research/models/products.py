"""Products with weights, and their gradients, now or later."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ONEDNN = torch.ops.mkldnn._linear_pointwise if torch.backends.mkldnn.is_available() else None
SMALL = 2**20  # multiplications: below, a call costs more than what it saves


def linear(x: Tensor, w: Tensor) -> Tensor:
    """x (.., I), w (O, I), both maybe views -> (.., O), where autograd does not look: in its functions.

    In float32 on a CPU by oneDNN, which torch itself takes for narrower types alone: its MKL uses AVX-512 on Intel's
    CPUs only, and is half as fast on others. `torch.backends.mkldnn.enabled` switches it off. A kernel is compiled for
    each shape, which takes half a millisecond: where rows change in number at every step, see `_windows`.
    """
    assert not torch.is_grad_enabled() or not (x.requires_grad or w.requires_grad)
    if _by_onednn(x, w):
        y: Tensor = ONEDNN(x, w, None, "none", [], "")  # type: ignore[misc]
        return y
    return F.linear(x, w)


def add_linear(y: Tensor, x: Tensor, w: Tensor) -> None:
    """y (.., O), contiguous, += linear(x, w), in place"""
    if _by_onednn(x, w):
        y.add_(linear(x, w))
    else:
        y.flatten(0, -2).addmm_(x.flatten(0, -2), w.T)


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dy (.., O), x (.., I) -> (O, I), of y = x w^T"""
    dy, x = dy.flatten(0, -2).T, x.flatten(0, -2).T
    if len(dy) > 3 * len(x) and _by_onednn(dy, x):  # it copies its first factor: logits, where that is dy of the head
        return linear(x, dy).T
    return linear(dy, x)


def _by_onednn(x: Tensor, w: Tensor) -> bool:
    return _onednn_takes(x) and x.dtype == w.dtype and x.numel() * len(w) >= SMALL


def _onednn_takes(x: Tensor) -> bool:
    here = ONEDNN is not None and x.device.type == "cpu" and bool(torch.backends.mkldnn.enabled)
    return here and x.dtype == torch.float32


class Kept(NamedTuple):
    """A weight gradient that was put off: what computes it, and for which weights."""

    weights: Sequence[Tensor]
    gradients: Callable[[], Sequence[Tensor]]  # holds inputs and output gradients until it has run


class Products:
    """The matrix products with a weight. One object for a model, so that what they do can be changed in one place.

    While `kept` is a list, backward puts the gradients of weights off into it: the pass for the gradient of the input
    alone. It is no global, as backward runs on other threads on CUDA.
    """

    def __init__(self) -> None:
        self.kept: list[Kept] | None = None

    @property
    def puts_off(self) -> bool:
        return self.kept is not None

    def linear(self, x: Tensor, w: Tensor) -> Tensor:
        """x (.., I), w (O, I) -> (.., O)"""
        y: Tensor = _Linear.apply(x, w, self)
        return y

    def grouped(self, rows: Tensor, w: Tensor, counts: Tensor) -> Tensor:
        """rows (N, I) sorted by expert, w (E, O, I), counts (E,) with sum N -> (N, O): each expert's product with its
        own rows. One kernel, in bfloat16 on recent GPUs (SM 9 and 10) without a host sync. What it refuses, float64
        and widths that are no multiple of 16 bytes, loops over the experts; so does what oneDNN takes."""
        y: Tensor = _Grouped.apply(rows, w, _where(rows, w, counts), self)
        return y

    def gradients(self, weights: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor | None]:
        """For the backward of a product: the gradients of its weights, or none where they are put off."""
        if self.kept is None:
            return compute()
        self.kept.append(Kept(weights, compute))
        return [None] * len(weights)


class _Linear(torch.autograd.Function):
    """
    forward   (.., I), (O, I) -> (.., O)   y = x w^T
    backward  (.., O) -> (.., I), (O, I)   dx = dy w;  dw = dy^T x, now or later
    """

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, products: Products) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, w)
        ctx.about = w, products
        return linear(x, w)

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
        x, w = ctx.saved_tensors
        weight, products = ctx.about  # the parameter itself, which recompute saves no more than an alias of
        dx = linear(dy, w.T) if ctx.needs_input_grad[0] else None
        (dw,) = products.gradients([weight], lambda: [weight_gradient(dy, x)])
        return dx, dw, None


Windows = tuple[tuple[slice, slice], ...]  # of each expert: rows for its product, and where its own are among them
Where = Windows | list[int] | Tensor  # or rows of each expert; or where they end (E,), on the device


class _Grouped(torch.autograd.Function):
    """For each expert e, which has n of the N rows:

    forward   (n, I), (O, I) -> (n, O)   y_e = x_e w_e^T
    backward  (n, O) -> (n, I), (O, I)   dx_e = dy_e w_e;  dw_e = dy_e^T x_e, now or later
    """

    @staticmethod
    def forward(ctx, rows: Tensor, w: Tensor, where: Where, products: Products) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(rows, w, where if isinstance(where, Tensor) else None)
        ctx.about = w, None if isinstance(where, Tensor) else where, products
        return _by_expert(rows, w.transpose(-2, -1), where)

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
        rows, w, ends = ctx.saved_tensors
        weight, sizes, products = ctx.about
        where = sizes if ends is None else ends
        dx = _by_expert(dy, w, where) if ctx.needs_input_grad[0] else None
        (dw,) = products.gradients([weight], lambda: [_of_experts(dy, rows, where)])
        return dx, dw, None, None


def _where(rows: Tensor, w: Tensor, counts: Tensor) -> Where:
    """What `grouped` computes by: oneDNN, torch's products one by one, or the one kernel."""
    usual = rows.numel() // len(w) * w.shape[1]  # multiplications of an expert; besides, its rows are cut and joined
    large = _onednn_takes(rows) and usual >= 2 * SMALL
    if large and (windows := _windows(counts.tolist())):
        return windows
    if rows.dtype == torch.float64 or any(n * w.element_size() % 16 for n in w.shape[1:]):
        return counts.tolist()
    return counts.cumsum(0, dtype=torch.int32)


def _by_expert(rows: Tensor, w: Tensor, where: Where) -> Tensor:
    """rows (N, I), w (E, I, O) -> (N, O)"""
    if isinstance(where, Tensor):
        return F.grouped_mm(rows, w, offs=where)
    if isinstance(where, tuple):
        return torch.cat([linear(rows[at], e.T)[own] for (at, own), e in zip(where, w.unbind(), strict=True)])
    return torch.cat([r @ e for r, e in zip(rows.split(where), w, strict=True)])


def _of_experts(dy: Tensor, rows: Tensor, where: Where) -> Tensor:
    """dy (N, O), rows (N, I) -> (E, O, I)"""
    if isinstance(where, Tensor):
        dw = F.grouped_mm(dy.T, rows, offs=where)
        if dw.is_cuda:  # some kernels leave what they find there to an expert without rows (pytorch issue 172439)
            dw.masked_fill_((where.diff(prepend=where.new_zeros(1)) == 0)[:, None, None], 0)
        return dw
    if isinstance(where, tuple):
        if dy.shape[1] > rows.shape[1]:
            return _of_experts(rows, dy, where).mT  # dw^T = rows^T dy, as the first factor is copied: the smaller one
        return torch.stack([linear(_alone(dy[at], own), rows[at].T) for at, own in where])
    return torch.stack([d.T @ r for d, r in zip(dy.split(where), rows.split(where), strict=True)])


def _windows(counts: list[int]) -> Windows:
    """Rows of each expert with some of its neighbours', so that their number is one of eight between two powers of two,
    and few kernels are compiled. None at all, where one expert has so many that its neighbours have too few."""
    windows, start, total = [], 0, sum(counts)
    for n in counts:
        step = 2 ** max(5, n.bit_length() - 4)
        size = (n + step - 1) // step * step
        if size > total:
            return ()
        first = min(start, total - size)
        windows.append((slice(first, first + size), slice(start - first, start - first + n)))
        start += n
    return tuple(windows)


def _alone(window: Tensor, own: slice) -> Tensor:
    """(n, O) -> (O, n), with zeros for rows that are not its own. The other factor has theirs, so that one that is not
    finite makes this expert's gradient so, too."""
    here = window.new_zeros(window.shape[1], len(window))
    here[:, own] = window[own].T
    return here
