"""Mixture of experts against transformers' Qwen3-MoE, Mixtral and OLMoE, with their balance loss.

Theirs pools the choices of all layers before it multiplies shares and scores, the Switch Transformer and ours take
each layer by itself: both agree where one layer is MoE. Their shares add up to top_k, ours to 1.
"""

import pytest
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from research.models import moe
from tests.models.hugging_face import TOLERANCE, VOCAB, worst

SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    rms_norm_eps=1e-5, pad_token_id=None, num_experts_per_tok=2, experts_implementation="eager",
)  # fmt: skip
OURS = {
    "model.dim": 32, "model.ffn": 24, "model.heads": 4, "model.kv_heads": 2, "model.head_dim": 8, "model.top_k": 2,
    "model.expert_ffn": 24, "model.shared_experts": 0, "model.dense_layers": 0, "model.balance": 0.0,
    "model.z_loss": 0.0,
}  # fmt: skip
FAMILIES = {
    "mixtral": (
        MixtralForCausalLM,
        MixtralConfig,
        {"num_local_experts": 6},
        {"model.experts": 6, "model.rope_base": 1e6},
    ),
    "mixtral, window": (
        MixtralForCausalLM,
        MixtralConfig,
        {"num_local_experts": 6, "sliding_window": 7},
        {"model.experts": 6, "model.rope_base": 1e6, "model.window": 7},
    ),
    "qwen3": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"num_experts": 10, "num_experts_per_tok": 4, "norm_topk_prob": True, "moe_intermediate_size": 24},
        {"model.experts": 10, "model.top_k": 4, "model.qk_norm": "head"},
    ),
    "qwen3, every second layer, weights as they are": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"num_experts": 10, "decoder_sparse_step": 2, "norm_topk_prob": False, "moe_intermediate_size": 16},
        {
            "model.experts": 10,
            "model.expert_ffn": 16,
            "model.moe_every": 2,
            "model.normalize_weights": False,
            "model.qk_norm": "head",
        },
    ),
    "olmoe": (
        OlmoeForCausalLM,
        OlmoeConfig,
        {"num_experts": 8, "num_experts_per_tok": 3},
        {"model.experts": 8, "model.top_k": 3, "model.normalize_weights": False, "model.qk_norm": "all"},
    ),
}


def of_family(family, moe_layers, balance=0.0):
    model, config, given, changes = FAMILIES[family]
    layers = moe_layers * given.get("decoder_sparse_step", 1)
    given = {**SIZES, "num_hidden_layers": layers, **given}
    if balance:
        given |= {"output_router_logits": True, "router_aux_loss_coef": balance}
        changes = {**changes, "model.balance": balance * given["num_experts_per_tok"]}
    return worst(model, config(**given), {**OURS, "model.layers": layers, **changes})


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family):
    assert of_family(family, moe_layers=3) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_balance_loss(family):
    assert of_family(family, moe_layers=1, balance=0.5) < TOLERANCE


def test_planted_faults(monkeypatch):
    real = moe.choose
    with monkeypatch.context() as patch:
        patch.setattr(moe, "choose", lambda scores, c: real(scores, c).roll(1, 0))
        assert of_family("qwen3", moe_layers=1) > 1e-3
    assert of_family("mixtral", moe_layers=2, balance=0.5) > 1e-4  # layers pooled
    model, config, given, changes = FAMILIES["olmoe"]
    monkeypatch.setitem(FAMILIES, "olmoe", (model, config, given, {**changes, "model.normalize_weights": True}))
    assert of_family("olmoe", moe_layers=1) > 1e-3
