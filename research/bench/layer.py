"""One decoder layer, forward and backward, against the layer of the `transformers` package with the same weights.

Both use torch's SDPA, in float32. For the MoE layer the other package has two implementations of its experts: products
grouped by expert, which it takes by default, and a loop over the experts.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3MoeConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

from research.bench.side_by_side import Case, Side, Values, by_torch
from research.config import ModelConfig
from research.models.decoder import Layer
from research.models.params import Block
from research.models.products import Products
from research.models.recompute import decide
from research.models.rope import Places, rotary
from research.models.seams import one_device

SAMPLES, LENGTH, DIM = 4, 512, 512
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64
DENSE = ModelConfig(dim=DIM, layers=1, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, ffn=1536, experts=0)
MOE = ModelConfig(
    dim=DIM, layers=1, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, qk_norm="head", dense_layers=0, experts=32,
    top_k=4, expert_ffn=384, shared_experts=0,
)  # fmt: skip
SHAPE = {
    "hidden_size": DIM, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
    "rms_norm_eps": DENSE.norm_eps, "attn_implementation": "sdpa",
}  # fmt: skip
TOLERANCE = 1e-5  # float32 sums in another order
NAMES = {  # theirs -> ours
    r"input_layernorm": "attention_norm",
    r"post_attention_layernorm": "ffn_norm",
    r"self_attn\.(\w)_proj\.weight": r"attention.w\1",
    r"self_attn": "attention",
    r"mlp\.gate\.weight": "ffn.router",
    r"mlp\.experts\.(\w+)_proj": r"ffn.w_\1",
    r"mlp\.(\w+)_proj\.weight": r"ffn.w_\1",
}


def cases() -> Iterator[Case]:
    sizes = f"{SAMPLES} x {LENGTH} tokens, D {DIM}"
    for threads in (1, 2):
        ours, llama = pair(DENSE, "transformers", *_llama())
        yield Case(f"dense layer, {sizes}, ffn {DENSE.ffn}", threads, TOLERANCE, ours, [llama, by_torch(ours)])
        (ours, grouped), (_, loop) = (
            pair(MOE, f"transformers, {experts}", *_qwen3_moe(experts)) for experts in ("grouped_mm", "eager")
        )
        name = f"MoE layer, {sizes}, {MOE.experts} experts of {MOE.expert_ffn}, top {MOE.top_k}"
        yield Case(name, threads, TOLERANCE, ours, [grouped, loop, by_torch(ours)])


def pair(c: ModelConfig, name: str, theirs: nn.Module, config: Any) -> tuple[Side, Side]:
    """Both layers with the same random weights, on the same input and output gradient."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.02 + (p.dim() == 1))
    x, dy = torch.randn(2, SAMPLES, LENGTH, DIM, generator=generator)
    positions = torch.arange(LENGTH).expand(SAMPLES, LENGTH)
    layer = _ours(c, renamed(dict(theirs.named_parameters())))
    at = Places(positions, None, rotary(positions, c, x.dtype), None, x[..., 0].numel())
    turns = LlamaRotaryEmbedding(config)(x, positions)  # of Qwen3-MoE too

    def run_ours() -> Values:
        x.grad = None
        y = layer(x.requires_grad_(), at, decide)[0]
        return _values(layer, x, y, dy)

    def run_theirs() -> Values:
        x.grad = None
        y = theirs(x.requires_grad_(), position_embeddings=turns, attention_mask=None)
        return _values(theirs, x, y, dy)

    return Side("quintet", run_ours), Side(name, run_theirs)


def _values(layer: nn.Module, x: Tensor, y: Tensor, dy: Tensor) -> Values:
    layer.zero_grad()
    y.backward(dy)
    assert x.grad is not None
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {"output": y.detach(), "input gradient": x.grad, **renamed(gradients)}


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights or gradients by our names; theirs keeps gate and up of the experts in one tensor. Ours stay."""
    ours: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for pattern, new in NAMES.items():
            name = re.sub(rf"^{pattern}", new, name)
        if name.endswith("w_gate_up"):
            ours |= dict(zip(("ffn.w_gate", "ffn.w_up"), tensor.detach().chunk(2, 1), strict=True))
        else:
            ours[name] = tensor.detach()
    return ours


def _ours(c: ModelConfig, weights: dict[str, Tensor]) -> Layer:
    layer, seams = Layer(c, 0), one_device(Products())
    for module in layer.modules():
        if isinstance(module, Block):
            module.seams = seams
    for name, parameter in layer.named_parameters():
        parameter.data.copy_(weights[name])
    return layer


def _llama() -> tuple[nn.Module, LlamaConfig]:
    sizes: dict[str, Any] = {**SHAPE, "intermediate_size": DENSE.ffn}
    config = LlamaConfig(**sizes)
    return LlamaDecoderLayer(config, 0), config


def _qwen3_moe(experts: str) -> tuple[nn.Module, Qwen3MoeConfig]:
    sizes: dict[str, Any] = {
        **SHAPE, "num_experts": MOE.experts, "num_experts_per_tok": MOE.top_k, "moe_intermediate_size": MOE.expert_ffn,
        "norm_topk_prob": True, "experts_implementation": experts,
    }  # fmt: skip
    config = Qwen3MoeConfig(**sizes)
    return Qwen3MoeDecoderLayer(config, 0), config
