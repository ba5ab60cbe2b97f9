"""What data parallelism receives, in closed form; README.md states the same.

n ranks that share a box and cut it, R copies of each shard, p elements of a shard
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction

import torch

from research.build import layout_of
from research.built import DTYPES
from research.config import ModelConfig, RunConfig, degrees
from research.mesh import Layout, Mesh
from research.models.decoder import Decoder, specs
from research.parallel.dp.shards import Cut

Bytes = dict[str, Fraction]  # by "purpose/op/phase" of the ledger


def traffic(config: RunConfig) -> Bytes:
    """Bytes that one rank receives in one training step for gradients and parameters, along whichever axes their copies
    lie. Every stage is counted: a rank of pp has its own share of them."""
    received: defaultdict[str, Fraction] = defaultdict(Fraction)
    with torch.device("meta"):
        declared = specs(Decoder(config.model))
    mesh = Mesh(degrees(config))
    wide = torch.float64 if config.train.dtype == "float64" else torch.float32
    grad = 2 if config.dp.grad_dtype == "bfloat16" else wide.itemsize
    for name, spec in declared.items():
        if spec.trained:
            layout = layout_of(spec, mesh)
            weight = (wide if spec.keep_float32 else DTYPES[config.train.dtype]).itemsize
            n, copies = sharing(mesh, layout, config.dp.replicas if config.dp.zero else mesh.sizes["dp"])
            for label, nbytes in _of_parameter(config, name, Cut(layout.local_shape(), n), copies, grad, weight):
                received[label] += nbytes
    return {label: nbytes for label, nbytes in received.items() if nbytes}


def sharing(mesh: Mesh, layout: Layout, parts: int) -> tuple[int, int]:
    """n and R of a parameter, where the dp axis is in so many parts."""
    places = [at for at in map(mesh.coordinates, range(mesh.world)) if at["pp"] == mesh.at["pp"]]
    same = [at["dp"] * parts // mesh.sizes["dp"] for at in places if layout.box(at) == layout.box(mesh.at)]
    return same.count(0), len(same) // same.count(0)


def _of_parameter(
    config: RunConfig, name: str, cut: Cut, copies: int, grad: int, weight: int
) -> Iterator[tuple[str, Fraction]]:
    dp, microbatches = config.dp, config.train.microbatches
    if dp.zero == 0:
        n = cut.n * copies
        yield "gradients/all_reduce/BW", Fraction(2 * (n - 1) * math.prod(cut.shape) * grad, n)
        return
    moved = Fraction((cut.n - 1) * cut.numel)  # elements of a reduce-scatter, or an all-gather
    yield "gradients/reduce_scatter/BW", moved * grad * (microbatches if dp.zero >= 2 else 1)
    yield "gradients/all_reduce/BW", Fraction(2 * (copies - 1) * cut.numel * grad, copies)
    if dp.zero < 3:
        yield "parameters/all_gather/optimizer", moved * weight
        return
    times = 1 if dp.keep_gathered else uses(config.model, name)
    yield "parameters/all_gather/F", moved * weight * times * microbatches
    yield "parameters/all_gather/BW", moved * weight * (not dp.keep_gathered) * microbatches


def uses(c: ModelConfig, name: str) -> int:
    """How often the unit of a parameter is gathered for one forward: the embedding and the head once more for each
    depth of multi-token prediction, a tied embedding with the head as well."""
    unit = name.partition(".")[0]
    return (1 + c.mtp_depth) * (1 + (c.tied and unit == "embedding")) if unit in ("embedding", "head") else 1
