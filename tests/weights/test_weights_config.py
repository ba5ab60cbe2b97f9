"""config.json of ten families and ModelConfig: as transformers writes them, as published, as refused."""

import dataclasses
import json

import pytest
import transformers

from research.config import ModelConfig
from research.presets import PRESETS
from research.problems import WeightsError
from research.weights.configs import canonical, family_of, misfits, read_config, write_config
from research.weights.families import FAMILIES, REQUIRED
from tests.weights.cases import ORACLES, model_of

# As on the hub, less keys that say nothing of the model.
LLAMA_31 = dict(
    architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=128000,
    eos_token_id=128001, hidden_act="silu", hidden_size=4096, initializer_range=0.02, intermediate_size=14336,
    max_position_embeddings=131072, mlp_bias=False, model_type="llama", num_attention_heads=32, num_hidden_layers=32,
    num_key_value_heads=8, pretraining_tp=1, rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=False,
    rope_scaling={
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    torch_dtype="bfloat16", transformers_version="4.43.0.dev0", use_cache=True, vocab_size=128256,
)  # fmt: skip
MIXTRAL = dict(
    hidden_act="silu", hidden_size=4096, intermediate_size=14336, max_position_embeddings=32768, model_type="mixtral",
    num_attention_heads=32, num_experts_per_tok=2, num_hidden_layers=32, num_key_value_heads=8, num_local_experts=8,
    output_router_logits=False, rms_norm_eps=1e-5, rope_theta=1000000.0, router_aux_loss_coef=0.02,
    sliding_window=None, tie_word_embeddings=False, vocab_size=32000,
)  # fmt: skip
QWEN_3 = dict(
    attention_bias=False, attention_dropout=0.0, decoder_sparse_step=1, head_dim=128, hidden_act="silu",
    hidden_size=2048, intermediate_size=6144, max_position_embeddings=40960, max_window_layers=48, mlp_only_layers=[],
    model_type="qwen3_moe", moe_intermediate_size=768, norm_topk_prob=True, num_attention_heads=32, num_experts=128,
    num_experts_per_tok=8, num_hidden_layers=48, num_key_value_heads=4, rms_norm_eps=1e-6, rope_scaling=None,
    rope_theta=1000000.0, router_aux_loss_coef=0.001, sliding_window=None, tie_word_embeddings=False,
    use_sliding_window=False, vocab_size=151936,
)  # fmt: skip
OLMOE = dict(
    attention_bias=False, clip_qkv=None, hidden_act="silu", hidden_size=2048, intermediate_size=1024,
    max_position_embeddings=4096, model_type="olmoe", norm_topk_prob=False, num_attention_heads=16, num_experts=64,
    num_experts_per_tok=8, num_hidden_layers=16, num_key_value_heads=16, rms_norm_eps=1e-5, rope_scaling=None,
    rope_theta=10000.0, router_aux_loss_coef=0.01, tie_word_embeddings=False, vocab_size=50304,
)  # fmt: skip
V2_LITE = dict(
    model_type="deepseek_v2", attention_bias=False, aux_loss_alpha=0.001, first_k_dense_replace=1, hidden_act="silu",
    hidden_size=2048, intermediate_size=10944, kv_lora_rank=512, max_position_embeddings=163840,
    moe_intermediate_size=1408, moe_layer_freq=1, n_group=1, n_routed_experts=64, n_shared_experts=2,
    norm_topk_prob=False, num_attention_heads=16, num_experts_per_tok=6, num_hidden_layers=27, num_key_value_heads=16,
    q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-6, routed_scaling_factor=1.0,
    rope_theta=10000, scoring_func="softmax", seq_aux=True, tie_word_embeddings=False, topk_group=1,
    topk_method="greedy", v_head_dim=128, vocab_size=102400,
    rope_scaling={
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
)  # fmt: skip
V2 = {
    **V2_LITE, "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_group": 8,
    "n_routed_experts": 160, "num_attention_heads": 128, "num_hidden_layers": 60, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "routed_scaling_factor": 16.0, "topk_group": 3, "topk_method": "group_limited_greedy",
}  # fmt: skip
V3 = {
    **V2, "model_type": "deepseek_v3", "ep_size": 1, "first_k_dense_replace": 3, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc",
    "vocab_size": 129280, "rope_scaling": {**V2["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
PUBLISHED = {
    "llama3_8b": LLAMA_31, "mixtral_8x7b": MIXTRAL, "qwen3_30b_a3b": QWEN_3, "olmoe_1b_7b": OLMOE,
    "deepseek_v2_lite": V2_LITE, "deepseek_v2": V2, "deepseek_v3": V3,
}  # fmt: skip


def preset(name):
    return ModelConfig(**PRESETS[name])


@pytest.mark.parametrize("name", ORACLES)
def test_what_transformers_writes_is_read(name, tmp_path):
    """Of the configs whose models equal ours by every gradient."""
    kind, given, changes = ORACLES[name]
    kind(**given).save_pretrained(tmp_path)
    theirs = json.loads((tmp_path / "config.json").read_text())
    for depths in ("num_nextn_predict_layers", "num_mtp_layers"):  # 1 by default, without their weights
        theirs.pop(depths, None)
    family, model = read_config(theirs)
    assert (family, canonical(model)) == (kind.model_type, canonical(model_of(changes)))
    assert misfits(model, family) == []


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_the_presets(name):
    want = dataclasses.replace(preset(name), mtp_depth=PUBLISHED[name].get("num_nextn_predict_layers", 0))
    family, model = read_config(PUBLISHED[name])
    assert canonical(model) == canonical(want)
    assert family_of(want) == family == PUBLISHED[name]["model_type"]
    written = write_config(want, family, positions=PUBLISHED[name]["max_position_embeddings"])
    same = PUBLISHED[name].keys() & written.keys() - {"rope_scaling"}
    told = {k: v for k, v in PUBLISHED[name].items() if k in same and not k.endswith("token_id")}
    assert {k: written[k] for k in told} == told | ({"intermediate_size": 128} if family == "qwen3_moe" else {})


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_left_out_is_as_in_transformers(family):
    kind = transformers.CONFIG_MAPPING[family]
    sizes = dict(model_type=family, vocab_size=50, hidden_size=256, num_attention_heads=32, num_hidden_layers=3)
    small = dict(routed_scaling_factor=1.5, moe_intermediate_size=8, n_group=1, topk_group=1, num_experts_per_tok=2)
    theirs = {n: small.get(n, 40) for n, k in FAMILIES[family].keys.items() if k.default is REQUIRED} | sizes
    theirs |= {"rms_norm_eps": 1e-6} | ({"n_shared_experts": 1} if "deepseek" in family else {})
    if family == "deepseek_v3":
        theirs |= {"n_group": 2, "topk_group": 1, "num_nextn_predict_layers": 1, "num_key_value_heads": 32}
    _, got = read_config(theirs)
    _, want = read_config(kind(**theirs).to_diff_dict())
    assert canonical(got) == canonical(want)


@pytest.mark.parametrize(
    "base, changes, told",
    [
        (LLAMA_31, {"hidden_act": "gelu"}, "hidden_act=gelu is not supported; legal: silu, swish"),
        (LLAMA_31, {"attention_dropout": 0.1}, "attention_dropout=0.1 is not supported; legal: 0.0, null"),
        (LLAMA_31, {"quantization_config": {"bits": 4}}, "is a quantised checkpoint; legal: null"),
        (LLAMA_31, {"model_type": "gpt2"}, "model_type=gpt2 is not a known family; legal: llama, qwen2, "),
        (LLAMA_31, {"logit_softcap": 30.0}, "logit_softcap=30 is not known: it may change the model; legal: no such"),
        (LLAMA_31, {"num_key_value_heads": 5}, "model.kv_heads=5 must divide model.heads=32"),
        (LLAMA_31, {"hidden_size": None}, "hidden_size is missing"),
        (
            LLAMA_31,
            {"hidden_size": "wide", "head_dim": 8},
            "model.dim=wide is not an integer; legal: an integer, at least 1",
        ),
        (LLAMA_31, {"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type=longrope is not known here; "),
        (LLAMA_31, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type=dynamic is not"),
        (LLAMA_31, {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing for linear"),
        (
            LLAMA_31,
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": 1.5}},
            "rope_scaling.attention_factor=1.5 is not known for yarn",
        ),
        (
            LLAMA_31,
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
            "rope_scaling.mscale_all_dim=1 would not reach the softmax of this family; legal: 0",
        ),
        (V3, {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale_all_dim": 1.0}}, "needs mscale beside it"),
        (V3, {"num_key_value_heads": 1}, "num_key_value_heads=1 must be num_attention_heads=128; legal: 128"),
        (V3, {"topk_method": "greedy"}, "topk_method=greedy is not supported; legal: noaux_tc"),
        (V3, {"rope_interleave": False}, "rope_interleave=false is not supported; legal: true"),
        (V2, {"topk_method": "noaux_tc"}, "topk_method=noaux_tc is not known here; legal: greedy, group_limited"),
        (QWEN_3, {"mlp_only_layers": [1]}, "mlp_only_layers=[1] must be the first layers"),
        (OLMOE, {"clip_qkv": 8.0}, "clip_qkv=8 is not supported; legal: null"),
        (OLMOE, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not known here; legal: 1"),
    ],
)
def test_what_is_not_ours_is_refused_by_name(base, changes, told):
    with pytest.raises(WeightsError) as error:
        read_config({**base, **changes})
    assert told in str(error.value) and len(error.value.problems) == 1


def test_all_problems_at_once():
    theirs = {k: v for k, v in LLAMA_31.items() if k not in ("vocab_size", "rms_norm_eps")} | {"hidden_act": "relu"}
    with pytest.raises(WeightsError) as error:
        read_config(theirs | {"num_key_value_heads": 5})
    assert [p.key for p in error.value.problems] == ["vocab_size", "rms_norm_eps", "hidden_act", "model.kv_heads"]
    assert str(error.value).startswith("4 problems with config.json:\n  - vocab_size is missing\n")


@pytest.mark.parametrize(
    "changes, family, told",
    [
        ({"model.experts": 0, "model.norm": "sandwich"}, None, "model.norm=sandwich is not possible in llama"),
        (
            {"model.experts": 0, "model.qk_norm": "head"},
            "llama",
            "model.qk_norm=head is not possible in llama; legal: none",
        ),
        (
            {"model.experts": 0, "model.qkv_bias": True},
            "llama",
            "model.out_bias=false is not possible in llama; legal: true",
        ),
        ({"model.experts": 0, "model.window": 7}, "llama", "model.window=7 is not possible in llama; legal: 0"),
        ({"model.experts": 0, "model.mtp_depth": 1}, "llama", "model.mtp_depth=1 is not possible in llama; legal: 0"),
        (
            {"model.experts": 0, "model.rope_scaling": "yarn", "model.rope_mscale": 0.5},
            "llama",
            "model.rope_mscale=0.5 is not possible in llama; legal: 1.0",
        ),
        (ORACLES["v3"][2] | {"model.bias_rate": 0.0}, "deepseek_v3", "model.bias_rate=0 is not possible in deepseek"),
        (ORACLES["mixtral"][2] | {"model.capacity": 1.5}, "mixtral", "model.capacity=1.5 is not possible in mixtral"),
        (ORACLES["v3"][2] | {"model.group_best": 1}, "deepseek_v3", "model.group_best=1 is not possible in deepseek"),
    ],
)
def test_what_a_family_cannot_say(changes, family, told):
    problems = misfits(model_of(changes), family) if family else []
    if family:
        assert [str(p) for p in problems if told in str(p)] == [str(p) for p in problems], problems
        assert problems
    else:
        with pytest.raises(WeightsError, match=told):
            family_of(model_of(changes))


def test_the_nearest_family_is_dense_or_not_as_the_model_is():
    """Of a dense one a single key differs, `experts`."""
    assert len(misfits(ModelConfig(), "llama")) == 1
    with pytest.raises(WeightsError) as error:
        family_of(ModelConfig())
    assert str(error.value).splitlines() == [
        "2 problems with the model, which fits no family; nearest is qwen3_moe:",
        "  - model.qk_norm=none is not possible in qwen3_moe; legal: head",
        "  - model.shared_experts=1 is not possible in qwen3_moe; legal: 0",
    ]
    with pytest.raises(WeightsError, match="nearest is llama"):
        family_of(ModelConfig(experts=0, norm="post"))


def test_all_misfits_are_listed_though_what_is_read_back_breaks_a_rule():
    """Latent attention needs rotary_dim, which this model has no use for."""
    assert [p.key for p in misfits(ModelConfig(), "deepseek_v2")] == ["model.attention", "model.normalize_weights"]
    scaled = ModelConfig(experts=0, rope_scaling="linear", rope_factor=2.0, qkv_bias=True)
    assert [p.key for p in misfits(scaled, "phi3")] == ["model.qkv_bias", "model.rope_scaling"]
