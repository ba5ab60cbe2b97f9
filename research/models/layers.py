"""RMSNorm and the gated feed-forward."""

from torch import Tensor, nn

from research.config import ModelConfig
from research.models.params import Block
from research.models.pointwise import rms_norm, swiglu


class RMSNorm(Block):
    """x / rms(x) * weight (Zhang and Sennrich 2019, eq. 4); inside float32 at least."""

    weight: nn.Parameter

    def __init__(self, eps: float, **dim: int | tuple[int, int]) -> None:
        """`dim`: the one that is normalised, by its logical name."""
        super().__init__()
        self.eps = eps
        self.param("weight", std=None, keep_float32=False, trained=True, **dim)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class HeadsNorm(RMSNorm):
    """RMSNorm over all heads together, of which a rank may hold some."""

    def forward(self, x: Tensor) -> Tensor:
        return self.seams.normalize(x, self.weight, self.eps)


class FeedForward(Block):
    """SwiGLU (Shazeer 2020, eq. 6): w_down (silu(w_gate x) * w_up x)."""

    w_gate: nn.Parameter
    w_up: nn.Parameter
    w_down: nn.Parameter

    b_gate: nn.Parameter
    b_up: nn.Parameter
    b_down: nn.Parameter

    def __init__(self, c: ModelConfig, width: int, bias: bool = False) -> None:
        super().__init__()
        self.bias = bias
        self.param("w_gate", ffn=width, dim=c.dim, std=c.init_std)
        self.param("w_up", ffn=width, dim=c.dim, std=c.init_std)
        self.param("w_down", dim=c.dim, ffn=width, std=residual_std(c))
        if bias:
            self.param("b_gate", ffn=width, std=0.0)
            self.param("b_up", ffn=width, std=0.0)
            self.param("b_down", dim=c.dim, std=0.0)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.seams.column(x, self.w_gate, self.w_up)
        if not self.bias:
            return self.seams.row(swiglu(gate, up), self.w_down)
        return self.seams.row(swiglu(gate + self.b_gate, up + self.b_up), self.w_down) + self.b_down


def residual_std(c: ModelConfig) -> float:
    """Outputs that are added to the residual stream start smaller: 2 * layers of them add up (GPT-2, section 2.3)."""
    return float(c.init_std / (2 * c.layers) ** 0.5)
