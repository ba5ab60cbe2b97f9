"""RMSNorm, rotary positions and the gated feed-forward.

B batch, S local sequence, D model, H heads, h head dim
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from research.config import ModelConfig
from research.models.params import Block


class RMSNorm(Block):
    """x / rms(x) * weight (Zhang and Sennrich 2019, eq. 4); inside float32 at least."""

    weight: nn.Parameter

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.eps = c.norm_eps
        self.param("weight", dim=c.dim)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Rotary(NamedTuple):
    """Cosine and sine of position * frequency, each (B, S, 1, h/2)."""

    cos: Tensor
    sin: Tensor


def rotary(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> Rotary:
    """positions (B, S): any integers, so that a rank may hold any part of a sequence (Su et al. 2021, eq. 34)."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=wide) / head_dim
    angles = (positions[..., None] * base**-exponents)[:, :, None]
    return Rotary(angles.cos().to(dtype), angles.sin().to(dtype))


def rotate(x: Tensor, r: Rotary) -> Tensor:
    """x (B, S, H, h): element i and i + h/2 are turned as a pair (the LLaMA order)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * r.cos - b * r.sin, b * r.cos + a * r.sin], -1)


class FeedForward(Block):
    """SwiGLU (Shazeer 2020, eq. 6): w_down (silu(w_gate x) * w_up x)."""

    w_gate: nn.Parameter
    w_up: nn.Parameter
    w_down: nn.Parameter

    def __init__(self, c: ModelConfig, width: int) -> None:
        super().__init__()
        self.param("w_gate", ffn=width, dim=c.dim, std=c.init_std)
        self.param("w_up", ffn=width, dim=c.dim, std=c.init_std)
        self.param("w_down", dim=c.dim, ffn=width, std=residual_std(c))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.seams.column(x, self.w_gate, self.w_up)
        return self.seams.row(F.silu(gate) * up, self.w_down)


def residual_std(c: ModelConfig) -> float:
    """Outputs that are added to the residual stream start smaller: 2 * layers of them add up (GPT-2, section 2.3)."""
    return float(c.init_std / (2 * c.layers) ** 0.5)
