"""What data parallelism receives, in closed form; README.md states the same.

n ranks that share a box and cut it, R copies of each shard, p elements of a shard
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from fractions import Fraction

import torch

from research.built import DTYPES
from research.config import ModelConfig, RunConfig, degrees
from research.ledger import Bytes, added, largest
from research.mesh import Layout, Mesh
from research.models.decoder import Decoder, names_of, specs
from research.models.params import Spec
from research.parallel.axis import layout_of, staged
from research.parallel.dp.shards import Cut


def traffic(config: RunConfig) -> Bytes:
    """Bytes that one rank receives in one training step for gradients and parameters, along whichever axes their copies
    lie; with stages, of each label the most that a rank of one receives. Where a backward is in two passes, B and W
    share what stands under BW here."""
    with torch.device("meta"):
        declared = specs(Decoder(config.model))
    cut = staged(config)
    held = [{stage: set(names_of(parts, declared)) for stage, parts in stages.items()} for stages in cut.stages(config)]
    last = max(stage for stages in held for stage in stages)

    def parts(rank: int) -> Iterator[tuple[str, Fraction]]:
        stages = held[rank]
        passes = Counter(a.stage for a in cut.program(config, rank).actions if a.kind == "F")
        for name in set().union(*stages.values()):
            if declared[name].trained:
                holders = sum(any(name in names for names in of_rank.values()) for of_rank in held)
                visits = {stage: passes[stage] for stage, names in stages.items() if name in names}
                yield from _of_parameter(config, name, declared[name], visits, last, holders)

    return largest(added(parts(rank)) for rank in range(len(held)))


def sharing(mesh: Mesh, layout: Layout, parts: int) -> tuple[int, int]:
    """n and R of a parameter, where the dp axis is in so many parts."""
    places = [at for at in map(mesh.coordinates, range(mesh.world)) if at["pp"] == mesh.at["pp"]]
    same = [at["dp"] * parts // mesh.sizes["dp"] for at in places if layout.box(at) == layout.box(mesh.at)]
    return same.count(0), len(same) // same.count(0)


def _of_parameter(
    config: RunConfig, name: str, spec: Spec, visits: Mapping[int, int], last: int, holders: int
) -> Iterator[tuple[str, Fraction]]:
    """`visits`: microbatches that meet it, by stage of this rank; what several stages share is reduced once a step.
    `last`: the model's last stage. `holders`: pp coordinates that have it."""
    dp, mesh = config.dp, Mesh(degrees(config))
    layout = layout_of(spec, mesh)
    n, copies = sharing(mesh, layout, dp.replicas if dp.zero else mesh.sizes["dp"])
    cut = Cut(layout.local_shape(), n)
    wide = torch.float64 if config.train.dtype == "float64" else torch.float32
    grad = 2 if dp.grad_dtype == "bfloat16" else wide.itemsize
    kept = cut.numel if dp.zero else math.prod(cut.shape)
    yield "copies/all_reduce/BW", Fraction(2 * (holders - 1) * kept * grad, holders)
    if dp.zero == 0:
        yield "gradients/all_reduce/BW", Fraction(2 * (n * copies - 1) * kept * grad, n * copies)
        return
    moved = Fraction((n - 1) * cut.numel)  # elements of a reduce-scatter, or an all-gather
    yield (
        "gradients/reduce_scatter/BW",
        moved * grad * (sum(visits.values()) if dp.zero >= 2 and len(visits) == 1 else 1),
    )
    yield "gradients/all_reduce/BW", Fraction(2 * (copies - 1) * cut.numel * grad, copies)
    weight = (wide if spec.keep_float32 else DTYPES[config.train.dtype]).itemsize
    if dp.zero < 3:
        yield "parameters/all_gather/optimizer", moved * weight
        return
    for stage, microbatches in visits.items():
        times = 1 if dp.keep_gathered else uses(config.model, name, stage == 0, stage == last)
        yield "parameters/all_gather/F", moved * weight * times * microbatches
        yield "parameters/all_gather/BW", moved * weight * (not dp.keep_gathered) * microbatches


def uses(c: ModelConfig, name: str, first: bool, last: bool) -> int:
    """How often the unit of a parameter is gathered for one forward of a stage, which may be the first or the last: the
    head once more for each depth of multi-token prediction, as is the embedding; a tied one with the head as well."""
    unit, heads = name.partition(".")[0], last * (1 + c.mtp_depth)
    if unit == "embedding":
        return first + last * c.mtp_depth + c.tied * heads
    return heads if unit == "head" else 1
