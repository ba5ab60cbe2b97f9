"""Attention, RoPE and biases against transformers' Llama, Qwen2, Qwen3, OLMo 2 and Phi-3."""

import pytest
import torch.nn.functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from research.config import ModelConfig
from research.models import attention, layers, rope, seams
from research.models.kernels import causal_attention
from tests.models.hugging_face import LENGTH, TOLERANCE, VOCAB, worst

SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-5, pad_token_id=None, max_position_embeddings=LENGTH,
)  # fmt: skip
OURS = {
    "model.dim": 32, "model.ffn": 40, "model.layers": 3, "model.heads": 4, "model.kv_heads": 2, "model.head_dim": 8,
    "model.experts": 0,
}  # fmt: skip
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}, {}),
    "llama, MHA, tied": (
        LlamaForCausalLM,
        LlamaConfig,
        {"num_key_value_heads": 4, "tie_word_embeddings": True},
        {"model.kv_heads": 4, "model.tied": True},
    ),
    "llama, MQA, biases": (
        LlamaForCausalLM,
        LlamaConfig,
        {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
        {"model.kv_heads": 1, "model.qkv_bias": True, "model.out_bias": True, "model.mlp_bias": True},
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}, {"model.qkv_bias": True}),
    "qwen2, window from the second layer": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        {"model.qkv_bias": True, "model.window": 5, "model.window_from": 1},
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}, {"model.qk_norm": "head"}),
    "qwen3, wide heads, another base": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"model.qk_norm": "head", "model.head_dim": 16, "model.rope_base": 1e6},
    ),
}
DYNAMIC = 3 * LENGTH / 8 - 2  # theirs grows with the length of a text, ours is what it comes to
SCALINGS = {
    "linear": ({"factor": 3.0}, {"model.rope_factor": 3.0}),
    "ntk": ({"rope_type": "dynamic", "factor": 3.0}, {"model.rope_factor": DYNAMIC}),
    "llama3": (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
        {"model.rope_factor": 8.0, "model.rope_context": 64, "model.rope_fast_turns": 4.0},
    ),
    "yarn": (
        {"factor": 4.0, "original_max_position_embeddings": 256},
        {"model.rope_factor": 4.0, "model.rope_context": 256},
    ),
    "yarn of another range": (
        {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8, "beta_slow": 2},
        {
            "model.rope_factor": 4.0,
            "model.rope_context": 64,
            "model.rope_fast_turns": 8.0,
            "model.rope_slow_turns": 2.0,
        },
    ),
    "yarn of DeepSeek": (
        {"factor": 4.0, "original_max_position_embeddings": 256, "mscale": 0.7, "mscale_all_dim": 0.9},
        {"model.rope_factor": 4.0, "model.rope_context": 256, "model.rope_mscale": 0.7, "model.rope_mscale_all": 0.9},
    ),
}


def of_family(family):
    model, config, given, changes = FAMILIES[family]
    return worst(model, config(**{**SIZES, **given}), {**OURS, **changes})


def llama(changes, **given):
    return worst(LlamaForCausalLM, LlamaConfig(**{**SIZES, **given}), {**OURS, **changes})


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family):
    assert of_family(family) < TOLERANCE


@pytest.mark.parametrize("name", SCALINGS)
def test_rope_scaling(name, monkeypatch):
    given, changes = SCALINGS[name]
    kind = name.split()[0]
    parameters = {"rope_type": kind, "rope_theta": 10000.0, **given}
    length = 8 if kind == "ntk" else LENGTH  # theirs stretches texts past their context only
    if "mscale_all_dim" in given:  # theirs leaves the softmax alone outside of DeepSeek's attention
        monkeypatch.setattr(attention, "softmax_scale", lambda c, width: width**-0.5)
    changes = {"model.rope_scaling": kind, **changes}
    assert llama(changes, rope_parameters=parameters, max_position_embeddings=length) < TOLERANCE


def test_norm_of_outputs():
    """OLMo 2, whose names of norms are Llama's with another meaning."""
    sizes = {k: v for k, v in SIZES.items() if k != "head_dim"}
    changes = {**OURS, "model.norm": "output", "model.qk_norm": "all"}
    assert worst(Olmo2ForCausalLM, Olmo2Config(**sizes), changes) < TOLERANCE


def test_partial_rotary():
    """Phi-3 keeps q, k, v and gate, up in one matrix each."""
    config = Phi3Config(
        **SIZES, rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    )
    assert worst(Phi3ForCausalLM, config, {**OURS, "model.rotary_dim": 4}) < TOLERANCE


def test_planted_faults(monkeypatch):
    """Each is far outside of the tolerance; none changes a shape."""

    def fails(module, name, fault, family):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, fault)
            return of_family(family) > 1e-4

    def one_more(q, k, v, scale, window, documents):
        return causal_attention(q, k, v, scale, window and window + 1, documents)

    windowed = "qwen2, window from the second layer"
    assert fails(seams, "causal_attention", one_more, windowed)
    assert fails(ModelConfig, "window_of", lambda c, layer: c.window, windowed)
    assert fails(layers.RMSNorm, "forward", lambda self, x: F.rms_norm(x, x.shape[-1:], self.weight, 0.1), "qwen3")
    assert fails(attention, "rotate", lambda x, r: rope.rotate(x, rope.Rotary(r.cos, -r.sin.roll(1, -1))), "llama")


@pytest.mark.parametrize("name", ["llama3", "yarn", "ntk"])
def test_planted_scaling_left_out(name):
    """A short text hardly shows what is made for long ones: it must show enough."""
    given, _ = SCALINGS[name]
    parameters = {"rope_type": {"ntk": "dynamic"}.get(name, name), "rope_theta": 10000.0, **given}
    assert llama({}, rope_parameters=parameters, max_position_embeddings=8 if name == "ntk" else LENGTH) > 1e-3
