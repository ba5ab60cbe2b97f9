"""A training step of a MoE decoder at ep=2 against the same model with stock expert parallelism, on two processes.

Both take steps of clipped AdamW on one batch, in float32, from equal weights. AdamW hardly sees the scale of a
gradient, so that experts' gradients are alike is told by the norm.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from research.bench.side_by_side import RankedCase, RankedSide, Values
from research.bench.torch_expert import TorchExpertTraining
from research.bench.workload import STEPS, batch_of, beside, config_of, sizes, values_of
from research.build import build
from research.config import RunConfig, replace
from research.launch.process import Place
from research.mesh import Mesh
from research.parallel.axis import cut_batch

RANKS = 2
MOE = {"model.dense_layers": 0, "model.shared_experts": 0, "model.balance": 0, "model.z_loss": 0, "ep.degree": RANKS}
EXPERTS = ((8, 384, 2), (64, 96, 8))  # how many, their width, and of how many a token makes use: as much work for both


def cases() -> Iterator[RankedCase]:
    for experts, width, top_k in EXPERTS:
        moe = {**MOE, "model.experts": experts, "model.expert_ffn": width, "model.top_k": top_k}
        config = replace(config_of("dp", {"degree": RANKS}), moe)
        name = f"ep {RANKS}, {experts} experts of {width}, top {top_k}, {sizes(config)}"
        yield beside(config, name, RankedSide("torch all_to_all_single, loop", partial(torchs, config)))


def torchs(config: RunConfig, place: Place, device: torch.device) -> Callable[[], Values]:
    """Their steps on this rank."""
    mine = cut_batch(batch_of(config), config, Mesh.from_config(config, place.world, place.rank))
    whole = build(config, Mesh({}), device).model
    training = TorchExpertTraining(config, dict(whole.named_parameters()), device)
    return lambda: values_of([training.step(mine) for _ in range(STEPS)])
