"""What tensor parallelism receives, and what it leaves to keep, in closed form; README.md states the same.

T tokens on this rank, D model, n tp ranks
"""

from collections.abc import Iterator
from fractions import Fraction

from research.config import ELEMENT_BYTES, RunConfig, step_tokens
from research.ledger import Bytes, added


def traffic(config: RunConfig) -> Bytes:
    """Bytes that one rank receives along tp in one training step of a model that is whole on a stage (pp.degree=1),
    without the sums of gradients: those belong to the storage of parameters, along whichever axes copies lie."""
    return added(_collectives(config)) if config.tp.degree > 1 else {}


def _collectives(config: RunConfig) -> Iterator[tuple[str, Fraction]]:
    """Of `stream` bytes, (n-1)/n of the residual stream of all tokens, an all-gather and a reduce-scatter each receive
    as many, an all-reduce twice as many. With full recompute a layer's forward is repeated in backward."""
    c, tp, tokens = config.model, config.tp, step_tokens(config)
    element = ELEMENT_BYTES[config.train.dtype]
    wide = max(element, ELEMENT_BYTES["float32"])
    part = Fraction(tp.degree - 1, tp.degree)
    stream = part * tokens * c.dim * element
    moe = [c.is_moe(layer) for layer in [*range(c.layers), *[c.layers - 1] * c.mtp_depth]]
    products = len(moe) + sum(not m or c.shared_experts > 0 for m in moe)  # pairs of column and row
    forward = ["F", "BW"] if config.train.recompute == "full" else ["F"]
    heads = 1 + c.mtp_depth
    if tp.sequence:
        gathers = forward if tp.keep_gathered else [*forward, "BW"]
        yield from ((f"column/all_gather/{phase}", products * stream) for phase in gathers)
        yield "column/reduce_scatter/BW", products * stream
        yield from ((f"row/reduce_scatter/{phase}", products * stream) for phase in forward)
        yield "row/all_gather/BW", products * stream
        yield from _both("lookup", "reduce_scatter", "all_gather", heads * stream)
        yield from _both("cross entropy", "all_gather", "reduce_scatter", heads * stream)
    else:
        yield from ((f"row/all_reduce/{phase}", products * 2 * stream) for phase in [*forward, "BW"])
        yield from _both("lookup", "all_reduce", "all_reduce", heads * 2 * stream)
        if any(moe):
            yield from _both("experts", "all_gather", "reduce_scatter", sum(moe) * stream)
            # Recompute ends with the last tensor that is kept: before this gather, unless a norm follows.
            again = sum(moe if c.norm != "pre" else moe[c.layers :])
            yield from ((f"experts/all_gather/{phase}", again * stream) for phase in forward[1:] if again)
    # Of each token the largest logit, the sum of exponentials and the target's logit.
    yield "cross entropy/all_reduce/F", heads * 3 * 2 * part * tokens * wide
    if c.qk_norm == "all":  # a mean square each for queries and keys
        squares = len(moe) * 2 * 2 * part * tokens * wide
        yield from ((f"normalize/all_reduce/{phase}", squares) for phase in [*forward, "BW"])


def _both(purpose: str, forward: str, backward: str, n: Fraction) -> Iterator[tuple[str, Fraction]]:
    yield f"{purpose}/{forward}/F", n
    yield f"{purpose}/{backward}/BW", n


def layer_bytes(config: RunConfig, tokens: int) -> int:
    """Bytes that a dense layer (GQA, pre-norm, no norm of queries and keys, no bias) keeps from forward to backward, of
    so many tokens in the samples of this rank."""
    c, tp = config.model, config.tp
    element = ELEMENT_BYTES[config.train.dtype]
    wide = max(element, ELEMENT_BYTES["float32"])
    n, recompute = tp.degree, config.train.recompute
    own = tokens // n if tp.sequence else tokens  # of the residual stream
    if recompute == "full":
        return own * c.dim * element
    norms = 2 * own * (c.dim * element + wide)  # inputs, and 1/rms
    gathered = tp.keep_gathered and n > 1
    inputs = 2 * c.dim * (tokens if gathered else 0 if recompute == "selective" else own)  # of `column`
    queries, keys = c.heads // n * c.head_dim, max(c.kv_heads, n) // n * c.head_dim
    attention = tokens * (2 * queries + 2 * keys)  # and its output, the input of `row`
    hidden = tokens * c.ffn // n * (2 if recompute == "selective" else 3)  # gate and up; their product
    return norms + (inputs + attention + hidden) * element + tokens * c.heads // n * wide  # logarithms of the softmax
