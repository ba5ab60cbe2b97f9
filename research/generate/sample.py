"""The next token of each sequence. What is drawn is a function of the seed, the sequence and the position, so that
neither the layout nor the other sequences of a batch change a text.

n sequences, V vocabulary
"""

import hashlib
import math

from torch import Tensor


def choose(logits: Tensor, temperature: float, top_p: float, draws: Tensor) -> Tensor:
    """logits (n, V), draws (n,) in [0, 1), float64 -> ids (n,). Temperature 0 takes the likeliest; else one is drawn of
    the fewest tokens whose probabilities add up to `top_p` (Holtzman et al. 2020, section 3.1)."""
    if temperature == 0:
        return logits.argmax(-1)
    wide = logits.double()  # a hundred thousand small probabilities shall add up to 1
    p = ((wide - wide.amax(-1, keepdim=True)) / temperature).softmax(-1)
    p, ids = p.sort(dim=-1, descending=True, stable=True)
    sums = p.cumsum(-1)
    kept = (sums - p < top_p).sum(-1, keepdim=True).clamp(min=1)  # of NaN none is
    aim = draws[:, None] * sums.gather(-1, kept - 1)
    place = (sums <= aim).sum(-1, keepdim=True).minimum(kept - 1)
    return ids.gather(-1, place)[:, 0]


def draw(seed: int, sequence: int, position: int) -> float:
    """Uniform in [0, 1)."""
    digest = hashlib.sha256(f"{seed}/{sequence}/{position}".encode()).digest()
    return math.ldexp(int.from_bytes(digest[:8], "little") >> 11, -53)
