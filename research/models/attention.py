"""Causal self-attention: MHA, GQA or MQA by the number of kv heads.

B batch, S local sequence, D model, H heads, G kv heads, h head dim
"""

from einops import rearrange
from torch import Tensor, nn

from research.config import ModelConfig
from research.models.layers import HeadsNorm, RMSNorm, residual_std
from research.models.params import Block
from research.models.rope import Places, rotate, softmax_scale


class Attention(Block):
    """x (B, S, D) -> (B, S, D). Local head counts are read off shapes: a rank may hold some of the heads."""

    wq: nn.Parameter
    wk: nn.Parameter
    wv: nn.Parameter
    wo: nn.Parameter
    bq: nn.Parameter
    bk: nn.Parameter
    bv: nn.Parameter
    bo: nn.Parameter

    def __init__(self, c: ModelConfig, window: int) -> None:
        super().__init__()
        self.c, self.window, self.scale = c, window, softmax_scale(c, c.head_dim)
        heads, kv_heads = (c.heads, c.head_dim), (c.kv_heads, c.head_dim)
        self.param("wq", heads=heads, dim=c.dim, std=c.init_std)
        self.param("wk", kv_heads=kv_heads, dim=c.dim, std=c.init_std)
        self.param("wv", kv_heads=kv_heads, dim=c.dim, std=c.init_std)
        self.param("wo", dim=c.dim, heads=heads, std=residual_std(c))
        if c.qkv_bias:
            self.param("bq", heads=heads, std=0.0)
            self.param("bk", kv_heads=kv_heads, std=0.0)
            self.param("bv", kv_heads=kv_heads, std=0.0)
        if c.out_bias:
            self.param("bo", dim=c.dim, std=0.0)
        if c.qk_norm == "head":
            self.q_norm = RMSNorm(c.norm_eps, head_dim=c.head_dim)
            self.k_norm = RMSNorm(c.norm_eps, head_dim=c.head_dim)
        elif c.qk_norm == "all":
            self.q_norm = HeadsNorm(c.norm_eps, heads=heads)
            self.k_norm = HeadsNorm(c.norm_eps, kv_heads=kv_heads)

    def forward(self, x: Tensor, at: Places) -> Tensor:
        projected = self.seams.column(x, self.wq, self.wk, self.wv)
        if self.c.qkv_bias:
            projected = [t + bias for t, bias in zip(projected, (self.bq, self.bk, self.bv), strict=True)]
        q, k, v = projected
        if self.c.qk_norm == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (rearrange(t, "b s (n h) -> b s n h", h=self.c.head_dim) for t in (q, k, v))
        if self.c.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        o = self.seams.attend(
            rotate(q, at.rotary),
            rotate(k, at.rotary),
            v,
            at.positions,
            scale=self.scale,
            window=self.window,
            documents=at.documents,
            starts=at.starts,
        )
        y = self.seams.row(rearrange(o, "b s n h -> b s (n h)"), self.wo)
        return y + self.bo if self.c.out_bias else y
