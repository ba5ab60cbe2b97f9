"""Multi-token prediction: layers after the last one, each of which looks one token further (DeepSeek-V3, section 2.2).

B batch, S local sequence, D model
"""

import torch
from torch import Tensor, nn

from research.config import ModelConfig
from research.models.layers import RMSNorm
from research.models.params import Block
from research.models.recompute import Keep
from research.models.rope import Places


class Prediction(Block):
    """One depth k. From what depth k - 1 gave its head, and the embedding of the token k places further:

        h'_k = M [norm(embedding); norm(h_{k-1})]    eq. 21; the released weights hold the embedding's half first
        h_k  = norm(layer(h'_k))                     eq. 22; logits are head(h_k), eq. 23, by the model's own head

    eq. 23 maps h_k to logits by a linear head, so h_k is after a norm, as h_0 is after that of the main model; each
    depth has a norm of its own (`shared_head.norm` of the released weights). Position i goes on to predict token
    i + k + 1 having seen those up to i + k. Positions without such a token pass the layer, and its router, like those
    of the main model without a target: later ones alone see them, which have none either.
    """

    projection: nn.Parameter

    def __init__(self, c: ModelConfig, layer: nn.Module) -> None:
        """`layer`: like the last one of the main model."""
        super().__init__()
        self.embedding_norm = RMSNorm(c.norm_eps, dim=c.dim)
        self.hidden_norm = RMSNorm(c.norm_eps, dim=c.dim)
        self.param("projection", dim=c.dim, embedding_and_hidden=2 * c.dim, std=c.init_std)
        self.layer = layer
        self.norm = RMSNorm(c.norm_eps, dim=c.dim)

    def forward(self, h: Tensor, embedded: Tensor, at: Places, keep: Keep) -> tuple[Tensor, Tensor]:
        """h, embedded (B, S, D) -> (B, S, D) and the layer's part of the auxiliary losses."""
        both = torch.cat([self.embedding_norm(embedded), self.hidden_norm(h)], -1)
        x, aux = self.layer(self.seams.products.linear(both, self.projection), at, keep)
        return self.norm(x), aux
