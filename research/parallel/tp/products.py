"""The products at whose edges activations change hands, each beside its communication.

B batch, S = n*s tokens, D model, O output and I input width on this rank, n tp ranks. A piece is a run of the s tokens
of every rank, so that pieces come and go one by one while the product of another is under way (`tp.overlap`). There are
no more of them than tokens, which in generation may be few.

A weight gradient that is put off to W (`Products.gradients`) keeps what it needs: the inputs of `column` as they are
here, s of their tokens, which it gathers in W; of `row` the gathered output gradient.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from research import comm
from research.mesh import Group
from research.models.products import Products, add_linear, linear, weight_gradient
from research.models.seams import Seam


def column(group: Group, products: Products, pieces: int, keep: bool) -> Seam:
    """x (B, s, D), weights (O, D) -> one (B, S, O) each."""

    def product(x: Tensor, *weights: Tensor) -> list[Tensor]:
        return list(_Column.apply(x, group, products, pieces, keep, *weights))

    return product


class _Column(torch.autograd.Function):
    """
    forward    x (B, s, D) all-gathered to X (B, S, D);  y = X w^T (B, S, O), for each weight
    backward   X gathered again, or kept;  dx (B, s, D) = sum of dy w, reduce-scattered
               beside, or later:  dw (O, D) = dy^T X
    """

    @staticmethod
    def forward(ctx, x: Tensor, group: Group, products: Products, pieces: int, keep: bool, *weights: Tensor):  # type: ignore[no-untyped-def]
        gathered, outputs = _gathered_product(x, group, "column", pieces, weights)
        ctx.about = group, products, pieces, keep, weights
        ctx.save_for_backward(gathered if keep else x, *weights)
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *dys: Tensor):  # type: ignore[no-untyped-def]
        group, products, pieces, keep, parameters = ctx.about
        x, *weights = ctx.saved_tensors
        again = None if keep or products.puts_off else comm.start_all_gather(x, group, "column")
        sums = _started_sums(dys, weights, group, "column", pieces)

        def gradients() -> Sequence[Tensor]:
            gathered = x if keep else comm.joined((again or comm.start_all_gather(x, group, "column")).wait(), 1)
            return [weight_gradient(dy, gathered) for dy in dys]

        dw = products.gradients(parameters, gradients)
        return _arrived(sums), None, None, None, None, *dw


def row(group: Group, products: Products, sequence: bool, pieces: int) -> Seam:
    """x (B, S, I), weight (D, I) -> (B, s, D), or (B, S, D) without sequence parallelism."""
    function = _RowScattered if sequence else _RowRepeated

    def product(x: Tensor, w: Tensor) -> Tensor:
        y: Tensor = function.apply(x, w, group, products, pieces)
        return y

    return product


class _RowScattered(torch.autograd.Function):
    """
    forward    y (B, s, D) = x (B, S, I) w^T, reduce-scattered
    backward   dy (B, s, D) all-gathered to dY (B, S, D);  dx = dY w;  dw (D, I) = dY^T x, now or later
    """

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, group: Group, products: Products, pieces: int) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.about = group, products, pieces, w
        ctx.save_for_backward(x, w)
        return _arrived(_started_sums([x], [w.T], group, "row", pieces))

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
        group, products, pieces, weight = ctx.about
        x, w = ctx.saved_tensors
        gathered, (dx,) = _gathered_product(dy, group, "row", pieces, [w.T])
        (dw,) = products.gradients([weight], lambda: [weight_gradient(gathered, x)])
        return dx, dw, None, None, None


class _RowRepeated(torch.autograd.Function):
    """
    forward    y (B, S, D) = x (B, S, I) w^T, all-reduced
    backward   dy (B, S, D) all-reduced;  dx = dy w;  dw (D, I) = dy^T x, now or later
    """

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, group: Group, products: Products, pieces: int) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.about = group, products, pieces, w
        ctx.save_for_backward(x, w)
        parts = (linear(part, w) for part in _cut(x, pieces, 1))
        return _arrived([comm.start_all_reduce(part, group, "row") for part in parts])

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
        group, products, pieces, weight = ctx.about
        x, w = ctx.saved_tensors
        parts = [part.clone(memory_format=torch.contiguous_format) for part in _cut(dy, pieces, 1)]
        sums = [comm.start_all_reduce(part, group, "row") for part in parts]
        dx = _side_by_side([linear(s.wait(), w.T) for s in sums])
        (dw,) = products.gradients([weight], lambda: [weight_gradient(_side_by_side(parts), x)])
        return dx, dw, None, None, None


def _gathered_product(
    x: Tensor, group: Group, purpose: str, pieces: int, weights: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """x (B, s, D) -> gathered X (B, S, D), and X w^T for each weight: each piece multiplied while the next travels."""
    coming = [comm.start_all_gather(piece, group, purpose) for piece in _cut(x, pieces, 1)]
    if len(coming) == 1:
        gathered = comm.joined(coming[0].wait(), 1)
        return gathered, [linear(gathered, w) for w in weights]
    parts, products = [], []
    for piece in coming:
        parts.append(comm.joined(piece.wait(), 1))
        products.append([linear(parts[-1], w) for w in weights])
    return _whole(parts, group.size), [_whole(p, group.size) for p in zip(*products, strict=True)]


def _started_sums(
    xs: Sequence[Tensor], weights: Sequence[Tensor], group: Group, purpose: str, pieces: int
) -> list[comm.Pending]:
    """xs (B, S, I) and weights (I, D) each -> the sum of their products, reduce-scattered: (B, some of s, D) each, all
    under way."""
    runs = zip(*(_pieces(x, group.size, pieces) for x in xs), strict=True)
    products = (_sum_of_products(run, weights) for run in runs)
    return [comm.start_reduce_scatter(comm.parted(y, group.size, 1), group, purpose) for y in products]


def _sum_of_products(xs: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    y = linear(xs[0], weights[0].T)
    for x, w in zip(xs[1:], weights[1:], strict=True):
        add_linear(y, x, w.T)
    return y


def _cut(x: Tensor, pieces: int, dim: int) -> Sequence[Tensor]:
    """Along dim; lengths differ by one at most, and none is 0."""
    return x.tensor_split(min(pieces, x.shape[dim]), dim)


def _pieces(x: Tensor, n: int, pieces: int) -> Iterator[Tensor]:
    """(B, S, ..) -> a run of every rank's tokens each."""
    if pieces == 1:
        yield x
        return
    for part in _cut(x.unflatten(1, (n, -1)), pieces, 2):
        yield part.flatten(1, 2)


def _whole(parts: Sequence[Tensor], n: int) -> Tensor:
    """The inverse of `_pieces`."""
    return torch.cat([part.unflatten(1, (n, -1)) for part in parts], 2).flatten(1, 2)


def _arrived(coming: Sequence[comm.Pending]) -> Tensor:
    return _side_by_side([one.wait() for one in coming])


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """(B, some tokens, ..) each, along tokens; one by itself is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)
