"""Latent attention and the routers of DeepSeek against transformers' DeepSeek-V2 and -V3. They have no balance loss."""

import pytest
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from research.models import mla, rope
from tests.models.hugging_face import PLAIN, TOLERANCE, TURNED, VALUE, VOCAB, worst

SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=40, moe_intermediate_size=24, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=4, q_lora_rank=20, kv_lora_rank=16, qk_nope_head_dim=PLAIN,
    qk_rope_head_dim=TURNED, v_head_dim=VALUE, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=2,
    first_k_dense_replace=1, rms_norm_eps=1e-6, pad_token_id=None, experts_implementation="eager",
)  # fmt: skip
OURS = {
    "model.dim": 32, "model.ffn": 40, "model.expert_ffn": 24, "model.layers": 3, "model.heads": 4,
    "model.attention": "mla", "model.q_latent": 20, "model.kv_latent": 16, "model.head_dim": PLAIN + TURNED,
    "model.rotary_dim": TURNED, "model.value_dim": VALUE, "model.experts": 8, "model.top_k": 3,
    "model.shared_experts": 2, "model.dense_layers": 1, "model.norm_eps": 1e-6, "model.balance": 0.0,
    "model.z_loss": 0.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 128}
OUR_YARN = {"model.rope_scaling": "yarn", "model.rope_factor": 8.0, "model.rope_context": 128}
V2 = {"model.normalize_weights": False}
V3 = {"model.router_score": "sigmoid", "model.group_best": 2, "model.bias_rate": 0.001}
FAMILIES = {
    "v2-lite": (DeepseekV2ForCausalLM, DeepseekV2Config, {"q_lora_rank": None}, {**V2, "model.q_latent": 0}),
    "v2": (
        DeepseekV2ForCausalLM,
        DeepseekV2Config,
        {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
        {
            **V2,
            **OUR_YARN,
            "model.expert_groups": 4,
            "model.top_groups": 2,
            "model.weight_scale": 16.0,
            "model.rope_mscale": 0.707,
            "model.rope_mscale_all": 0.707,
        },
    ),
    "v3": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
        {**V3, "model.expert_groups": 4, "model.top_groups": 2, "model.weight_scale": 2.5},
    ),
    "v3, yarn, weights as they are": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": False,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        {**V3, **OUR_YARN, "model.normalize_weights": False, "model.rope_mscale_all": 1.0},
    ),
}


def of_family(family):
    model, config, given, changes = FAMILIES[family]
    return worst(model, config(**{**SIZES, **given}), {**OURS, **changes})


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family):
    assert of_family(family) < TOLERANCE


def test_planted_faults(monkeypatch):
    """A softmax without YaRN's factor; a group judged by its best expert alone; pairs that turn at the wrong speed."""
    with monkeypatch.context() as patch:
        patch.setattr(mla, "softmax_scale", lambda c, width: width**-0.5)
        assert of_family("v2") > 1e-3
    with monkeypatch.context() as patch:
        patch.setattr(mla, "rotate", lambda x, r: rope.rotate(x, rope.Rotary(r.cos, r.sin.flip(-1))))
        assert of_family("v2-lite") > 1e-3
    model, config, given, changes = FAMILIES["v3"]
    monkeypatch.setitem(FAMILIES, "v3", (model, config, given, {**changes, "model.group_best": 1}))
    assert of_family("v3") > 1e-3
