"""A plain decoder under torch's own tensor parallelism, as PyTorch's tutorial builds it (DTensor): linear layers and
embedding are cut by `parallelize_module`, the loss by `loss_parallel`. The same function as `models/decoder.py`.

B batch, S tokens, D model, H heads, G kv heads, h head dim
"""

import re
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from research.config import ModelConfig, RunConfig
from research.models.batch import Batch
from research.models.rope import Rotary, rotary
from research.train.optim import adamw

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # (B, H, S, h), (B, G, S, h) twice -> (B, H, S, h), causal
Fed = Callable[[ModelConfig], nn.Module]  # makes a layer's (B, S, D) -> (B, S, D)


def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All tokens are here."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class Attention(nn.Module):
    """(B, S, D) -> (B, S, D); with some of the heads where its linear layers are cut."""

    def __init__(self, c: ModelConfig, attend: Attend) -> None:
        super().__init__()
        self.head_dim, self.attend = c.head_dim, attend
        self.wq = nn.Linear(c.dim, c.heads * c.head_dim, bias=False)
        self.wk = nn.Linear(c.dim, c.kv_heads * c.head_dim, bias=False)
        self.wv = nn.Linear(c.dim, c.kv_heads * c.head_dim, bias=False)
        self.wo = nn.Linear(c.heads * c.head_dim, c.dim, bias=False)

    def forward(self, x: Tensor, turns: Rotary) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k, v = (t.transpose(1, 2) for t in (turned(q, turns), turned(k, turns), v))
        y: Tensor = self.wo(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return y


def turned(x: Tensor, turns: Rotary) -> Tensor:
    """x (B, S, H, h): RoPE of pairs i, i + h/2."""
    cos, sin = (torch.cat([t, t], -1) for t in turns)
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class FeedForward(nn.Module):
    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.w_gate = nn.Linear(dim, width, bias=False)
        self.w_up = nn.Linear(dim, width, bias=False)
        self.w_down = nn.Linear(width, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w_down(F.silu(self.w_gate(x)) * self.w_up(x))
        return y


def dense(c: ModelConfig) -> nn.Module:
    return FeedForward(c.dim, c.ffn)


class Layer(nn.Module):
    def __init__(self, c: ModelConfig, attend: Attend, ffn: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(c.dim, c.norm_eps) for _ in range(2))
        self.attention, self.ffn = Attention(c, attend), ffn

    def forward(self, x: Tensor, turns: Rotary) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        y: Tensor = x + self.ffn(self.ffn_norm(x))
        return y


class Decoder(nn.Module):
    """(B, S) ids -> (B, S, V) logits"""

    def __init__(self, c: ModelConfig, attend: Attend, ffn: Fed) -> None:
        super().__init__()
        self.embedding = nn.Embedding(c.vocab, c.dim)
        self.layers = nn.ModuleList(Layer(c, attend, ffn(c)) for _ in range(c.layers))
        self.norm, self.head = nn.RMSNorm(c.dim, c.norm_eps), nn.Linear(c.dim, c.vocab, bias=False)

    def forward(self, ids: Tensor, turns: Rotary) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, turns)
        logits: Tensor = self.head(self.norm(x))
        return logits


def decoder(
    c: ModelConfig, weights: Mapping[str, Tensor], device: torch.device, attend: Attend = alone, ffn: Fed = dense
) -> Decoder:
    """With given weights, named as ours."""
    model = Decoder(c, attend, ffn).to(device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[ours(name)])
    return model


def plan(sequence: bool) -> dict[str, ParallelStyle]:
    """What stands in the tutorial, for all layers at once; with sequence parallelism or without."""
    stream = Shard(1) if sequence else Replicate()
    cut = {f"layers.*.attention.w{part}": ColwiseParallel() for part in "qkv"}
    cut |= {f"layers.*.ffn.w_{part}": ColwiseParallel() for part in ("gate", "up")}
    joined = {name: RowwiseParallel(output_layouts=stream) for name in ("layers.*.attention.wo", "layers.*.ffn.w_down")}
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "head": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
    }
    if not sequence:
        return cut | joined | ends
    norms = {name: SequenceParallel() for name in ("layers.*.attention_norm", "layers.*.ffn_norm", "norm")}
    gathered = {
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(stream, None), desired_input_layouts=(Replicate(), None)
        ),
        "layers.*.ffn": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),)),
    }
    return cut | joined | ends | norms | gathered


class TorchTraining:
    """Steps of AdamW from given whole weights, named as ours."""

    def __init__(self, config: RunConfig, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self.config = config
        self.model = decoder(config.model, weights, device)
        mesh = init_device_mesh(device.type, (config.tp.degree,))
        parallelize_module(self.model, mesh, plan(config.tp.sequence))
        self.optimizer = adamw(config.train, [(p, p.dim() > 1) for p in self.model.parameters()])

    def step(self, batch: Batch) -> Tensor:
        """The loss before the step."""
        logits = self.model(batch.tokens, rotary(batch.positions, self.config.model, torch.float32))
        with loss_parallel():
            loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach()


def ours(name: str) -> str:
    """The name of one of these parameters in our decoder."""
    name = re.sub(r"\.(w[qkvo]|w_\w+|router)\.weight$", r".\1", name)
    return f"head.{name}" if name == "norm.weight" else name
