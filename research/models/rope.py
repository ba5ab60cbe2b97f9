"""Rotary positions, and how they are scaled to longer texts.

B batch, S local sequence, H heads, h head dim, R elements of a head that are turned
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from research.config import ModelConfig
from research.models.batch import Batch
from research.models.pointwise import turn


class Rotary(NamedTuple):
    """Cosine and sine of position * frequency, each (B, S, 1, R/2)."""

    cos: Tensor
    sin: Tensor


class Places(NamedTuple):
    """Where the tokens of a batch stand: what a layer needs to know beside their content.

    Positions go on over the boundaries of documents: RoPE sees distances only, so that a document that sees nothing
    else is the same from 0 as from anywhere (the families restart nothing in training either: Llama 3, section 3.2,
    masks; DeepSeek-V3, section 4.1, does not even mask).
    """

    positions: Tensor  # (B, S)
    documents: Tensor | None  # (B, S), where a token sees its own document only
    rotary: Rotary
    numbers: Tensor | None  # (B, S) in the global microbatch, where experts have a capacity, or a load that is given
    whole_tokens: int  # of the global microbatch
    starts: Tensor | None = None  # of the batch


def places(batch: Batch, c: ModelConfig, dtype: torch.dtype) -> Places:
    documents = batch.documents if c.document_mask else None
    numbers = batch.numbers if c.capacity or c.load != "routed" else None
    turns = rotary(batch.positions, c, dtype)
    return Places(batch.positions, documents, turns, numbers, batch.whole_tokens, batch.starts)


def rotary(positions: Tensor, c: ModelConfig, dtype: torch.dtype) -> Rotary:
    """positions (B, S): any integers, so that a rank may hold any part of a sequence (Su et al. 2021, eq. 34)."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angles = (positions[..., None] * frequencies(c, positions.device).to(wide))[:, :, None]
    grown = _mscale(c, c.rope_mscale) / _mscale(c, c.rope_mscale_all)
    return Rotary((angles.cos() * grown).to(dtype), (angles.sin() * grown).to(dtype))


def rotate(x: Tensor, r: Rotary) -> Tensor:
    """x (B, S, H, h): element i and i + R/2 are turned as a pair (the LLaMA order); those from R on are left alone."""
    return turn(x, r.cos, r.sin)


def softmax_scale(c: ModelConfig, width: int) -> float:
    """What query times key is multiplied with, for heads of this width. Under YaRN it grows by the square of
    `rope_mscale_all`'s factor, which so reaches elements that are not turned, too (DeepSeek-V2, section 3.1.4)."""
    return float(width**-0.5 * _mscale(c, c.rope_mscale_all) ** 2)


def frequencies(c: ModelConfig, device: torch.device | None = None) -> Tensor:
    """(R/2,) radians for each position, float64."""
    width, pair = c.rotary_width, torch.arange(c.rotary_width // 2, device=device, dtype=torch.float64)
    base = c.rope_base
    if c.rope_scaling == "ntk":  # the slowest pair is slowed by the whole factor, the fastest by none
        base *= c.rope_factor ** (width / (width - 2))
    plain = base ** (-2 * pair / width)
    if c.rope_scaling == "linear":  # Chen et al. 2023, eq. 4
        return plain / c.rope_factor
    if c.rope_scaling == "llama3":
        turns = c.rope_context * plain / (2 * math.pi)
        left_alone = (turns - c.rope_slow_turns) / (c.rope_fast_turns - c.rope_slow_turns)
    elif c.rope_scaling == "yarn":
        # The paper's ramp (Peng et al. 2023, eq. 18) is llama3's; its code, and models since, ramp over pair numbers.
        low = max(math.floor(_pair_of(c, c.rope_fast_turns)), 0)
        high = min(math.ceil(_pair_of(c, c.rope_slow_turns)), width - 1)
        left_alone = 1 - (pair - low) / max(high - low, 0.001)
    else:
        return plain
    left_alone = left_alone.clamp(0, 1)
    return plain * (left_alone + (1 - left_alone) / c.rope_factor)  # Peng et al. 2023, eq. 19


def _pair_of(c: ModelConfig, turns: float) -> float:
    """The number of the pair, not an integer, that turns so often in `rope_context` tokens."""
    return c.rotary_width * math.log(c.rope_context / (turns * 2 * math.pi)) / (2 * math.log(c.rope_base))


def _mscale(c: ModelConfig, weight: float) -> float:
    """YaRN's attention factor (Peng et al. 2023, eq. 22), its logarithm weighted."""
    return 0.1 * weight * math.log(c.rope_factor) + 1 if c.rope_scaling == "yarn" else 1.0
