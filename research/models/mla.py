"""Multi-head latent attention (DeepSeek-V2, section 2.1 and appendix C).

B batch, S local sequence, D model, H heads, h head dim of queries and keys, R of them turned, v head dim of values,
L latent of keys and values
"""

from functools import partial

import torch
from einops import rearrange
from torch import Tensor, nn

from research.config import ModelConfig
from research.models.layers import RMSNorm, residual_std
from research.models.params import Block
from research.models.rope import Places, rotate, softmax_scale


class LatentAttention(Block):
    """x (B, S, D) -> (B, S, D). Keys and values of all heads are made from one latent, and RoPE turns R elements that
    stand first in each head, for keys the same ones in all heads (the paper has them last: no product differs).

    Latents are whole on every rank that holds some of the heads, as their weights are.
    """

    wq: nn.Parameter
    wq_down: nn.Parameter
    wq_up: nn.Parameter
    wkv_down: nn.Parameter
    wkv_up: nn.Parameter
    wo: nn.Parameter

    def __init__(self, c: ModelConfig, window: int) -> None:
        super().__init__()
        self.c, self.window, self.scale = c, window, softmax_scale(c, c.head_dim)
        self.plain = c.head_dim - c.rotary_dim  # elements of a head that are not turned
        std, heads = c.init_std, (c.heads, c.head_dim)
        if c.q_latent:
            self.param("wq_down", q_latent=c.q_latent, dim=c.dim, std=std)
            self.q_norm = RMSNorm(c.norm_eps, q_latent=c.q_latent)
            self.param("wq_up", heads=heads, q_latent=c.q_latent, std=std)
        else:
            self.param("wq", heads=heads, dim=c.dim, std=std)
        self.param("wkv_down", kv_latent=c.kv_latent + c.rotary_dim, dim=c.dim, std=std)
        self.kv_norm = RMSNorm(c.norm_eps, kv_latent=c.kv_latent)
        self.param("wkv_up", heads=(c.heads, self.plain + c.value_dim), kv_latent=c.kv_latent, std=std)
        self.param("wo", dim=c.dim, heads=(c.heads, c.value_dim), std=residual_std(c))

    def forward(self, x: Tensor, at: Places) -> Tensor:
        c = self.c
        q, kv = self.seams.column(x, self.wq_down if c.q_latent else self.wq, self.wkv_down)
        if c.q_latent:
            q = self.seams.products.linear(self.q_norm(q), self.wq_up)
        q = rotate(rearrange(q, "b s (n h) -> b s n h", h=c.head_dim), at.rotary)
        latent, key = kv.split([c.kv_latent, c.rotary_dim], -1)
        latent, key = self.kv_norm(latent), rotate(key[:, :, None], at.rotary)
        o = self.seams.attend_latent(q, latent, key, self.wkv_up, partial(self.expanded, at))
        return self.seams.row(rearrange(o, "b s n v -> b s (n v)"), self.wo)

    def expanded(self, at: Places, q: Tensor, latent: Tensor, key: Tensor) -> Tensor:
        """(B, S, H, h), (B, S, L), (B, S, 1, R) -> (B, S, H, v), with a key and a value of each head."""
        made = self.seams.products.linear(latent, self.wkv_up)
        made = rearrange(made, "b s (n e) -> b s n e", e=self.plain + self.c.value_dim)
        plain, v = made.split([self.plain, self.c.value_dim], -1)
        k = torch.cat([key.expand(-1, -1, made.shape[2], -1), plain], -1)
        about = {"scale": self.scale, "window": self.window, "documents": at.documents, "starts": at.starts}
        return self.seams.attend(q, k, v, at.positions, **about)
