"""What context parallelism receives, in closed form; README.md states the same.

T tokens of a step on this rank, n ranks: u of Ulysses times N of the ring, H heads, G kv heads, h head dim, v of values
"""

from collections.abc import Iterator
from fractions import Fraction

from research.config import ELEMENT_BYTES, RunConfig, degrees, step_tokens
from research.ledger import Bytes, added
from research.parallel.cp.plan import make_plan
from research.parallel.cp.ulysses import copies, inner_degree


def traffic(config: RunConfig, rank: int | None = None) -> Bytes:
    """Bytes that one rank receives along cp in one training step: the rank at this place on the axis, or the one that
    receives most. Borders of documents may spare some of them, which depends on the data."""
    if config.cp.degree == 1:
        return {}
    if rank is None:
        everyone = (traffic(config, r) for r in range(config.cp.degree))
        return max(everyone, key=lambda received: sum(received.values()))
    c = config.model
    windows = [c.window_of(layer) for layer in [*range(c.layers), *[c.layers - 1] * c.mtp_depth]]
    return added(part for window in windows for part in _layer(config, window, rank))


def _layer(config: RunConfig, window: int, rank: int) -> Iterator[tuple[str, Fraction]]:
    """With full recompute the forward is repeated in backward."""
    c, cp, tokens, tp = config.model, config.cp, step_tokens(config), degrees(config)["tp"]
    element = ELEMENT_BYTES[config.train.dtype]
    wide = max(element, ELEMENT_BYTES["float32"])
    forward = ["F", "BW"] if config.train.recompute == "full" else ["F"]
    u = inner_degree(cp)
    n, heads = cp.degree // u, c.heads // tp
    kv_heads = heads if c.attention == "mla" else max(c.kv_heads // tp, 1)
    kv_heads *= copies(kv_heads, u)
    pair = c.head_dim + c.value_width  # a key and a value
    if u > 1:
        away = Fraction(u - 1, u) * tokens * element
        for phase in [*forward, "BW"]:
            yield f"heads for tokens/all_to_all/{phase}", away * (heads * c.head_dim + kv_heads * pair)
            yield f"tokens for heads/all_to_all/{phase}", away * heads * c.value_width
    if n > 1:
        plan = make_plan(n, 0, cp.balance, config.data.sequence, window)
        rows = Fraction(tokens * cp.degree, config.data.sequence)
        come, back, ways = plan.received(rank // u), plan.returned(rank // u), ("exchange", "exchange")
        if cp.method == "all_gather":  # those of all others
            come = back = config.data.sequence * (n - 1) // n
            ways = ("all_gather", "reduce_scatter")
        each = rows * pair * (kv_heads // u)
        yield from ((f"keys and values/{ways[0]}/{phase}", come * each * element) for phase in [*forward, "BW"])
        yield f"gradients of keys and values/{ways[1]}/BW", back * each * wide
