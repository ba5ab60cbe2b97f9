"""A training step in two pipeline stages, of one rank each or of two tp ranks, against the same model under torch's own
parts; and schedules that split the backward against our 1F1B.

All take steps of AdamW on one batch, in float32, from equal weights: the loss of a later step tells whether gradients
and optimizer agree, too.
"""

from collections.abc import Iterator
from functools import partial

import torch

from research import comm
from research.bench.side_by_side import Case, RankedCase, Side, Values
from research.bench.torch_pipeline import TorchPipeline
from research.bench.workload import STEPS, TOLERANCE, batch_of, config_of, our_sides, side, sizes
from research.build import build
from research.config import RunConfig, replace
from research.launch.process import Place
from research.mesh import Mesh, total_ranks

STAGES, MICROBATCHES, TP = 2, 4, 2
SPLIT = ("zb_h1", "zbv")  # schedules


def cases() -> Iterator[RankedCase]:
    plain = config_of("pp", {"degree": STAGES}, microbatches=MICROBATCHES, clip=0.0)
    cut = replace(plain, {"tp.degree": TP, "tp.keep_gathered": True})  # torch keeps them, too
    for config in (plain, cut):
        name = named(config)
        yield RankedCase(name, total_ranks(config), config.launch, partial(beside_torch, config, name))
    for schedule in SPLIT:
        config = replace(plain, {"pp.schedule": schedule})
        name = named(config)
        yield RankedCase(name, total_ranks(config), config.launch, partial(beside_ours, config, name, plain))


def named(config: RunConfig) -> str:
    tp = f", tp {config.tp.degree}" if config.tp.degree > 1 else ""
    return f"pp {config.pp.degree}{tp}, {config.pp.schedule}, {MICROBATCHES} microbatches, {sizes(config)}"


def beside_torch(config: RunConfig, name: str, place: Place, device: torch.device) -> Case:
    """This rank's part of both."""
    batch, mesh = batch_of(config), Mesh.from_config(config, place.world, place.rank)
    ours, plain = our_sides(config, mesh, device)
    weights = dict(build(replace(config, {"pp.degree": 1, "tp.degree": 1}), Mesh({}), device).model.named_parameters())
    other = TorchPipeline(config, weights, device)

    def run_theirs() -> Values:
        losses = torch.stack([other.step(batch) for _ in range(STEPS)])
        return {"losses": comm.all_reduce_(losses, mesh.group("world"), "loss") / config.tp.degree}

    return Case(name, 1, TOLERANCE, ours, [Side("torch pipelining", run_theirs), plain])


def beside_ours(config: RunConfig, name: str, other: RunConfig, place: Place, device: torch.device) -> Case:
    """This rank's part of both schedules."""
    mesh = Mesh.from_config(config, place.world, place.rank)
    ours, theirs = (side(c, f"quintet {c.pp.schedule}", mesh, device) for c in (config, other))
    return Case(name, 1, TOLERANCE, ours, [theirs])
