"""Who sends to whom: the choices of a router, seen as rows that travel between the ranks of an expert group."""

import dataclasses
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from research.config import RunConfig
from research.mesh import total_ranks
from research.models.batch import Batch
from research.models.moe import MoE
from research.parallel.axis import cut_batch
from research.report.trace import on_rank


def choices(config: RunConfig, batch: Batch, layer: int) -> Tensor:
    """(tokens, K): the experts that each token of a whole microbatch chooses in an MoE layer of one process."""
    assert total_ranks(config) == 1, "one process sees the whole microbatch"
    found: list[Tensor] = []
    with on_rank(config) as built, torch.no_grad():
        moe = built.model.layers[str(layer)].ffn
        assert isinstance(moe, MoE), f"layer {layer} has no experts"

        def watched(x: Tensor, ids: Tensor, *args: Any, **more: Any) -> object:
            found.append(ids)
            return inner(x, ids, *args, **more)

        inner = moe.seams.experts
        moe.seams = dataclasses.replace(moe.seams, experts=watched)  # type: ignore[arg-type]
        built.model(cut_batch(batch, config, built.mesh))
    return found[0]


def rows_sent(config: RunConfig, ids: Tensor, batch: Batch) -> pd.DataFrame:
    """Rows that each rank (line) has for each rank (column), itself included, when the tokens of a microbatch choose
    `ids` (tokens, K). A rank must have tokens of its own (`tp.sequence`, where tp cuts)."""
    world = total_ranks(config)
    sent = torch.zeros(world, world, dtype=torch.int64)
    for rank in range(world):
        with on_rank(config, rank) as built:
            group = built.mesh.group("experts")
            numbers = cut_batch(batch, config, built.mesh).numbers
            assert numbers is not None, "a batch is numbered before it is cut"
            mine = ids[built.model.embedding.seams.residual(numbers).flatten()]
            each = config.model.experts * config.ep.tensor // group.size
            for place, other in enumerate(group.ranks):
                sent[rank, other] = int((mine // each == place // config.ep.tensor).sum())
    names = pd.RangeIndex(world)
    return pd.DataFrame(sent.numpy(), index=names.rename("from rank"), columns=names.rename("to rank"))
