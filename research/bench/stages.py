"""A training step in two pipeline stages, of one rank each or of two tp ranks, against the same model under torch's own
parts; and schedules that split the backward against our 1F1B.

All take steps of AdamW on one batch, in float32, from equal weights: the loss of a later step tells whether gradients
and optimizer agree, too.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from research import comm
from research.bench.side_by_side import RankedCase, RankedSide, Values
from research.bench.torch_pipeline import TorchPipeline
from research.bench.workload import STEPS, TOLERANCE, batch_of, beside, config_of, sizes, training
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
        yield beside(config, named(config), RankedSide("torch pipelining", partial(torchs, config)))
    for schedule in SPLIT:
        config = replace(plain, {"pp.schedule": schedule})
        ours, theirs = (RankedSide(f"quintet {c.pp.schedule}", partial(training, c)) for c in (config, plain))
        yield RankedCase(named(config), total_ranks(config), config.launch, TOLERANCE, ours, [theirs])


def named(config: RunConfig) -> str:
    tp = f", tp {config.tp.degree}" if config.tp.degree > 1 else ""
    return f"pp {config.pp.degree}{tp}, {config.pp.schedule}, {MICROBATCHES} microbatches, {sizes(config)}"


def torchs(config: RunConfig, place: Place, device: torch.device) -> Callable[[], Values]:
    """Their steps on this rank."""
    batch, world = batch_of(config), Mesh.from_config(config, place.world, place.rank).group("world")
    weights = dict(build(replace(config, {"pp.degree": 1, "tp.degree": 1}), Mesh({}), device).model.named_parameters())
    pipeline = TorchPipeline(config, weights, device)

    def run() -> Values:
        losses = torch.stack([pipeline.step(batch) for _ in range(STEPS)])
        return {"losses": comm.all_reduce_(losses, world, "loss") / config.tp.degree}

    return run
