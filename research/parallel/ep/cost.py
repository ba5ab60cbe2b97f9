"""What expert parallelism receives, in closed form; README.md states the same.

D model, E experts, K top-k, n ranks of the group
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from research.config import ELEMENT_BYTES, ModelConfig, RunConfig, microbatch_tokens, step_tokens
from research.ledger import Bytes, added

COUNT, ID = 8, 4  # bytes


@dataclass(frozen=True)
class Load:
    """Rows that cross between ranks for one MoE layer in one step, over all microbatches: one for each choice and each
    part of the chosen expert (`ep.tensor`)."""

    arrive: Fraction  # of other ranks' choices, at the experts of this rank
    leave: Sequence[Fraction]  # of this rank's choices, for experts of other ranks, by piece (`ep.overlap`)


def traffic(config: RunConfig, loads: Sequence[Load] | None = None) -> Bytes:
    """Bytes that one rank receives along ep in one training step, without the sums of gradients. `loads`: of each MoE
    layer, those of multi-token prediction last; None: all experts have as much to do. What all-gather receives depends
    on no load."""
    if config.ep.degree * config.ep.tensor == 1:
        return {}
    if config.ep.dispatch == "all_gather":
        return added(_all_gather(config))
    return added(_all_to_all(config, even(config) if loads is None else loads))


def even(config: RunConfig) -> list[Load]:
    """Of each MoE layer, as every rank sees it. Where a capacity is below the even share, that much is kept."""
    c, ep = config.model, config.ep
    n = ep.degree * ep.tensor
    kept = min(Fraction(str(c.capacity)), Fraction(1)) if c.capacity else Fraction(1)
    rows = Fraction(step_tokens(config), config.tp.degree) * c.top_k * kept * ep.tensor * Fraction(n - 1, n)
    return [Load(rows, [rows / ep.overlap] * ep.overlap) for _ in _moe_layers(c)]


def _all_to_all(config: RunConfig, loads: Sequence[Load]) -> Iterator[tuple[str, Fraction]]:
    """A row travels to an expert with its routing weight, and without one back. With full recompute it is sent again,
    and comes back as far as `_again` says."""
    c, ep, element = config.model, config.ep, ELEMENT_BYTES[config.train.dtype]
    others = ep.degree * ep.tensor - 1
    counts = others * ep.overlap * c.experts // ep.degree * len(loads) * config.train.microbatches
    arrive = sum((load.arrive for load in loads), Fraction())
    leave = sum((sum(load.leave, Fraction()) for load in loads), Fraction())
    yield "expert loads/all_to_all/F", Fraction(counts * COUNT)
    yield "dispatch/all_to_all/F", arrive * (c.dim + 1) * element
    yield "combine/all_to_all/F", leave * c.dim * element
    yield "combine/all_to_all/BW", arrive * c.dim * element
    yield "dispatch/all_to_all/BW", leave * (c.dim + 1) * element
    if config.train.recompute == "full":
        yield "dispatch/all_to_all/BW", arrive * (c.dim + 1) * element
        again = zip(loads, _again(config), strict=True)
        rows = sum((sum(load.leave[:pieces], Fraction()) for load, pieces in again), Fraction())
        yield "combine/all_to_all/BW", rows * c.dim * element


def _all_gather(config: RunConfig) -> Iterator[tuple[str, Fraction]]:
    """A token travels with its K routing weights and, once, with K ids. Ranks with fewer tokens are filled up."""
    c, ep, element = config.model, config.ep, ELEMENT_BYTES[config.train.dtype]
    others, layers = ep.degree * ep.tensor - 1, len(_moe_layers(c))
    tokens = [n // config.tp.degree for n in microbatch_tokens(config)]
    received = Fraction(others * layers * sum(tokens))
    counts = others * layers * len(tokens) * ep.overlap * (c.experts + 1)
    yield "expert loads/all_gather/F", Fraction(counts * COUNT)
    yield "dispatch/all_gather/F", received * ((c.dim + c.top_k) * element + c.top_k * ID)
    yield "combine/reduce_scatter/F", received * c.dim * element
    yield "combine/all_gather/BW", received * c.dim * element
    yield "dispatch/reduce_scatter/BW", received * (c.dim + c.top_k) * element
    if config.train.recompute == "full":
        yield "dispatch/all_gather/BW", received * (c.dim + c.top_k) * element
        again = sum(sum(_lengths(n, ep.overlap)[:pieces]) for n in tokens for pieces in _again(config))
        yield "combine/reduce_scatter/BW", Fraction(others * again * c.dim * element)


def _again(config: RunConfig) -> list[int]:
    """Of each MoE layer, the pieces that come back once more where its forward is repeated. That ends with the last
    tensor that is kept: in the experts' work on the last piece, unless a norm of the output follows."""
    c, pieces = config.model, config.ep.overlap
    return [pieces if c.norm != "pre" or layer >= c.layers else pieces - 1 for layer in _moe_layers(c)]


def _moe_layers(c: ModelConfig) -> list[int]:
    """Their numbers; those of multi-token prediction, which are like the last one, count on."""
    return [i for i in range(c.layers + c.mtp_depth) if c.is_moe(min(i, c.layers - 1))]


def _lengths(tokens: int, pieces: int) -> list[int]:
    return [tokens // pieces + (i < tokens % pieces) for i in range(pieces)]
