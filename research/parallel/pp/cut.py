"""Which part of the model is whose stage: a cut of the row (embedding, layers, head) into consecutive pieces.

A part is a prefix of parameter names: `embedding`, `layers.0`, ..., `head`. Depths of multi-token prediction belong to
the head, which they multiply with.
"""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import torch

from research.config import ModelConfig, RunConfig
from research.models.decoder import Decoder, specs
from research.models.flops import flops_by_part

EMBEDDING, HEAD = "embedding", "head"
FORM = re.compile(r"even|cost|\d+(,\d+)*")  # of `pp.cut`
LEGAL = "even, cost, or how many layers each stage has: 2,3,3,2"


def cut_of(config: RunConfig, stages: int) -> tuple[tuple[str, ...], ...]:
    """The cut that `pp.cut` asks for. Raises ValueError where a list of layers does not fit."""
    layers, how = config.model.layers, config.pp.cut
    if how == "even":
        return evenly(layers, stages)
    if how == "cost":
        with torch.device("meta"):
            declared = specs(Decoder(config.model))
        return by_cost(flops_by_part(config.model, declared, config.data.sequence, causal=True), stages)
    counts = [int(count) for count in how.split(",")]
    if len(counts) != stages:
        raise ValueError(f"there are {stages} stages, not {len(counts)}")
    return by_list(layers, counts)


def with_copies(model: ModelConfig, parts: Sequence[str]) -> Sequence[str]:
    """The head comes with the depths of multi-token prediction, and with a copy of the embedding where it needs one."""
    if HEAD not in parts:
        return parts
    copied = model.tied or model.mtp_depth
    return (*dict.fromkeys([*parts, "mtp", *([EMBEDDING] if copied else [])]),)


def row_of(layers: int) -> tuple[str, ...]:
    """All parts of a model, in the order of forward."""
    return (EMBEDDING, *(f"layers.{i}" for i in range(layers)), HEAD)


def evenly(layers: int, stages: int) -> tuple[tuple[str, ...], ...]:
    """Parts of each stage: as many layers in each, or one more. The stages with embedding and head are the last to get
    one more, and the only ones that may have none. Raises ValueError where a stage would be empty."""
    _fits(layers, stages)
    order = [*range(1, stages - 1), 0, stages - 1] if stages > 1 else [0]
    counts = [layers // stages] * stages
    for stage in order[: layers % stages]:
        counts[stage] += 1
    return by_list(layers, counts)


def by_list(layers: int, counts: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Parts of each stage, for an explicit number of layers in each. Raises ValueError where they do not add up, or
    leave a stage empty."""
    if min(counts, default=-1) < 0 or sum(counts) != layers:
        raise ValueError(f"layers of stages={list(counts)} must add up to layers={layers}, none below 0")
    parts = row_of(layers)
    ends = [1 + e for e in accumulate(counts)]
    ends[-1] += 1
    cut = tuple(parts[start:end] for start, end in pairwise([0, *ends]))
    if empty := [stage for stage, held in enumerate(cut) if not held]:
        raise ValueError(
            f"layers of stages={list(counts)} leave nothing to stages {empty}: each needs a layer, but the first, "
            "which holds the embedding, and the last, which holds the head"
        )
    return cut


def by_cost(costs: Mapping[str, float], stages: int) -> tuple[tuple[str, ...], ...]:
    """Parts of each stage such that the costliest stage costs as little as it can, none empty; the others are then as
    equal as that allows. `costs` has every part, in order.

    Raises ValueError where a stage would be empty or a cost is negative.
    """
    parts, values = list(costs), list(costs.values())
    _fits(len(parts) - 2, stages)
    if not all(value >= 0 for value in values):
        raise ValueError(f"costs of parts must not be negative: {dict(costs)}")
    sums = [0.0, *accumulate(values)]
    least = _least(sums, stages)
    end, ends = len(parts), [len(parts)]
    for k in range(stages, 1, -1):  # from the last stage back
        good = [i for i in range(k - 1, end) if max(least[k - 2][i], sums[end] - sums[i]) <= least[-1][-1]]
        fair = sums[end] * (k - 1) / k
        end = min(good, key=lambda i: abs(sums[i] - fair))
        ends.append(end)
    return tuple(tuple(parts[start:end]) for start, end in pairwise([0, *reversed(ends)]))


def _least(sums: Sequence[float], stages: int) -> list[list[float]]:
    """[k][n]: what the costliest of k + 1 stages costs at least, if they hold the first n parts. A dynamic programme
    over where the last of them starts."""
    tables = [list(sums)]
    for k in range(1, stages):
        before = tables[-1]
        tables.append(
            [min((max(before[i], sums[n] - sums[i]) for i in range(k, n)), default=math.inf) for n in range(len(sums))]
        )
    return tables


def _fits(layers: int, stages: int) -> None:
    if not 1 <= stages <= layers + 2:
        raise ValueError(f"stages={stages} do not fit layers={layers}, embedding and head; legal: 1 to {layers + 2}")
