"""Causal self-attention: MHA, GQA or MQA by the number of kv heads.

B batch, S local sequence, D model, H heads, G kv heads, h head dim
"""

from einops import rearrange
from torch import Tensor, nn

from research.config import ModelConfig
from research.models.layers import Rotary, residual_std, rotate
from research.models.params import Block


class Attention(Block):
    """x (B, S, D) -> (B, S, D). Local head counts are read off shapes: a rank may hold some of the heads."""

    wq: nn.Parameter
    wk: nn.Parameter
    wv: nn.Parameter
    wo: nn.Parameter

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.param("wq", heads=(c.heads, c.head_dim), dim=c.dim, std=c.init_std)
        self.param("wk", kv_heads=(c.kv_heads, c.head_dim), dim=c.dim, std=c.init_std)
        self.param("wv", kv_heads=(c.kv_heads, c.head_dim), dim=c.dim, std=c.init_std)
        self.param("wo", dim=c.dim, heads=(c.heads, c.head_dim), std=residual_std(c))

    def forward(self, x: Tensor, positions: Tensor, r: Rotary) -> Tensor:
        projected = self.seams.column(x, self.wq, self.wk, self.wv)
        q, k, v = (rearrange(t, "b s (n h) -> b s n h", h=self.head_dim) for t in projected)
        o = self.seams.attend(rotate(q, r), rotate(k, r), v, positions)
        return self.seams.row(rearrange(o, "b s n h -> b s (n h)"), self.wo)
