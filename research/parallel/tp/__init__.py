"""Tensor parallelism, with sequence parallelism or without. See README.md beside this file.

B batch, S tokens of a sample on this cp rank, s = S/n of them, D model, O output width on this rank, n tp ranks
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from research import comm
from research.config import ModelConfig, RunConfig, degrees
from research.mesh import Group, Mesh
from research.models import kernels
from research.models.batch import Batch
from research.models.products import Products
from research.models.seams import Seam
from research.parallel.tp.products import column, row
from research.problems import Problem, divisors


class TensorParallel:
    """Heads, feed-forward width and vocabulary are cut. Between `row` and `column` each rank has the tokens of a part
    of each sample (`tp.sequence`), or all of them.

    Without sequence parallelism the gradient of the repeated stream is a part on each rank, whose sum is the true one:
    `row` sums them in backward, as it sums outputs in forward, and `column` needs nothing. So a gradient of any copied
    parameter is the sum over its replicas in both modes.
    """

    name = "tp"
    splits: Mapping[str, str] = {"heads": "tp", "kv_heads": "tp", "ffn": "tp", "vocab": "tp"}

    def problems(self, config: RunConfig) -> Iterator[Problem]:
        tp, sizes = config.tp, degrees(config)
        if tp.keep_gathered and not tp.sequence:
            yield Problem("tp.keep_gathered", True, "has nothing to keep with tp.sequence=false", "false")
        if tp.degree == 1:
            return
        for name, size in _must_divide(config.model):
            if size % tp.degree:
                yield Problem("tp.degree", tp.degree, f"must divide {name}={size}", divisors(size))
        kv_heads = config.model.kv_heads
        if config.model.attention != "mla" and kv_heads % tp.degree and tp.degree % kv_heads:
            rule = f"must divide model.kv_heads={kv_heads}, or be a multiple of it"
            legal = [d for d in range(1, config.model.heads + 1) if config.model.heads % d == 0]
            legal = [d for d in legal if kv_heads % d == 0 or d % kv_heads == 0]
            yield Problem("tp.degree", tp.degree, rule, ", ".join(map(str, legal)))
        if config.model.vocab < tp.degree:
            rule = f"exceeds model.vocab={config.model.vocab}"
            yield Problem("tp.degree", tp.degree, rule, f"1 to {config.model.vocab}")
        tokens = config.data.sequence // sizes["cp"]
        if (tp.sequence or config.model.experts) and tokens % tp.degree:
            rule = f"must divide the {tokens} tokens of a sample on each rank (data.sequence/cp.degree)"
            yield Problem("tp.degree", tp.degree, rule, divisors(tokens))
        cut = max(tokens // tp.degree if tp.sequence else tokens, 1)
        if tp.overlap > cut:
            rule = f"exceeds the {cut} tokens of a sample that each rank sends"
            yield Problem("tp.overlap", tp.overlap, rule, f"1 to {cut}")

    def seams(self, config: RunConfig, mesh: Mesh, products: Products) -> Mapping[str, Seam]:
        group = mesh.group("tp")
        if group.size == 1:
            return {}
        tp = config.tp
        seams: dict[str, Seam] = {
            "row": row(group, products, tp.sequence, tp.overlap),
            "lookup": lookup(group, tp.sequence),
            "cross_entropy": cross_entropy(group, config.model.vocab, tp.sequence),
            "logits": logits(group, config.model.vocab, tp.sequence),
            "normalize": normalize(group),
        }
        if tp.sequence:
            seams["column"] = column(group, products, tp.overlap, tp.keep_gathered)
            seams["residual"] = lambda t: t.chunk(group.size, 1)[group.rank]
        return seams

    def wraps(self, config: RunConfig, mesh: Mesh) -> Mapping[str, Callable[[Seam], Seam]]:
        group = mesh.group("tp")
        return {"experts": sliced(group)} if group.size > 1 and not config.tp.sequence else {}

    def cut_batch(self, batch: Batch, config: RunConfig, mesh: Mesh) -> Batch:
        """Whole: every rank looks all tokens up, and attends to them with its own heads."""
        return batch


def _must_divide(c: ModelConfig) -> Iterator[tuple[str, int]]:
    yield "model.heads", c.heads
    if c.experts == 0 or c.dense_layers > 0 or c.moe_every > 1:
        yield "model.ffn", c.ffn
    if c.experts and c.shared_experts:
        yield "the shared width model.shared_experts*model.expert_ffn", c.shared_experts * c.expert_ffn


def lookup(group: Group, sequence: bool) -> Seam:
    """Each rank looks up the ids of its own rows; the others' come out as zeros, and the parts add up."""

    def look_up(weight: Tensor, tokens: Tensor) -> Tensor:
        own = tokens - group.rank * len(weight)
        mine = (own >= 0) & (own < len(weight))
        part = kernels.embed(weight, own.where(mine, 0)).masked_fill(~mine[..., None], 0)
        if sequence:
            return comm.reduce_scatter(part, group, "lookup", dim=1)
        return comm.all_reduce(part, group, "lookup")

    return look_up


def cross_entropy(group: Group, vocab: int, sequence: bool) -> Seam:
    """The softmax over all ranks' rows, of which the last may be padding. One value that all ranks compute, so the
    first one alone reports it; its gradient flows on each rank through the rank's own rows, from a seed of 1."""

    def loss(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        low = group.rank * len(head)
        if sequence:
            x = comm.all_gather(x, group, "cross entropy", dim=1)

        def largest(t: Tensor) -> Tensor:
            return comm.all_reduce_(t, group, "cross entropy", comm.MAX)

        def total(t: Tensor) -> Tensor:
            return comm.all_reduce_(t, group, "cross entropy")

        y = kernels.cross_entropy(x.flatten(0, 1), head, targets.flatten(), low, vocab, largest, total)
        return y if group.rank == 0 else _Unreported.apply(y)

    return loss


def logits(group: Group, vocab: int, sequence: bool) -> Seam:
    """Each rank multiplies with its own rows of the head; only the tokens that are asked for travel."""

    def product(x: Tensor, head: Tensor, rows: Tensor) -> Tensor:
        if sequence:
            sample, place = rows // (x.shape[1] * group.size), rows % (x.shape[1] * group.size)
            own = place - group.rank * x.shape[1]
            mine = (own >= 0) & (own < x.shape[1])
            x = comm.all_reduce(x[sample, own.where(mine, 0)].masked_fill(~mine[:, None], 0), group, "logits")
        else:
            x = x.flatten(0, 1)[rows]
        return comm.all_gather(F.linear(x, head), group, "logits", dim=1)[:, :vocab]

    return product


class _Unreported(torch.autograd.Function):
    """
    forward   () -> ()   0
    backward  () -> ()   as it comes
    """

    @staticmethod
    def forward(ctx, y: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return torch.zeros_like(y)

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
        return dy


def normalize(group: Group) -> Seam:
    """RMSNorm over the heads of all ranks. Where several hold a copy of a head, all heads have as many: one mean."""

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        square = comm.all_reduce(wide.square().sum(-1, keepdim=True), group, "normalize")
        y: Tensor = wide * (square / (group.size * x.shape[-1]) + eps).rsqrt() * weight
        return y.to(x.dtype)

    return norm


def sliced(group: Group) -> Callable[[Seam], Seam]:
    """Where tokens are repeated, each rank sends a slice of them to the experts, whoever owns these."""

    def wrap(inner: Callable[..., Any]) -> Seam:
        def experts(x: Tensor, ids: Tensor, weights: Tensor, *args: object, **more: object) -> object:
            x, ids, weights = (t.chunk(group.size)[group.rank] for t in (x, ids, weights))
            y, shared = inner(x, ids, weights, *args, **more)
            return comm.all_gather(y, group, "experts", dim=0), shared

        return experts

    return wrap
