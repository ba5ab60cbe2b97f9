"""The families of models in Hugging Face folders: what each calls the keys of its config.json and its tensors.

One table: `FAMILIES`. A family says what differs from the one that it resembles. What is no matter of names (RoPE,
windows, latent attention, which layers are MoE) is in `codecs.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from research.weights.codecs import Codec, groups, heads, latent, leading_dense, nextn, rope, window

REQUIRED = object()


@dataclass(frozen=True)
class Key:
    """A key of config.json, carried over as it is."""

    ours: tuple[str, ...]  # the keys of `model` that it sets
    default: Any = REQUIRED  # what transformers takes where config.json leaves it out


@dataclass(frozen=True)
class Family:
    """`legal` values but the first are read, not written; the first stands for an absent key."""

    architecture: str  # the class in transformers
    keys: Mapping[str, Key]
    codecs: tuple[Codec, ...]
    settled: Mapping[str, Any]  # keys of `model` that no key of config.json decides
    layer: Mapping[str, str]  # our name in a layer -> theirs; `{e}`: one for each expert; shared: one after another
    legal: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # keys of config.json with one meaning here
    aliases: Mapping[str, str] = field(default_factory=dict)  # other names of keys -> those above
    turned: Mapping[str, str] = field(default_factory=dict)  # our name in a layer -> how its rows differ (`tensors`)
    ignored: frozenset[str] = frozenset()  # keys of config.json that change no weight and no logit


def key(*ours: str, default: Any = REQUIRED) -> Key:
    return Key(ours, default)


LEGAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0.0, None),
    "quantization_config": (None,),
    "compression_config": (None,),
}
IGNORED = frozenset(
    {
        "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "auto_map",
        "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "pretraining_tp",
        "output_router_logits", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "ep_size",
        "experts_implementation", "_attn_implementation", "attn_implementation",
    }
)  # fmt: skip

# Names outside of the layers, and of a depth of multi-token prediction beside its layer (DeepSeek-V3's README of its
# weights); that one counts as a layer after the last.
WHOLE: Mapping[str, str] = {
    "embedding.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
DEPTH: Mapping[str, str] = {
    "embedding_norm.weight": "enorm.weight",
    "hidden_norm.weight": "hnorm.weight",
    "projection": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
}
DEPTH_COPIES: Mapping[str, str] = {  # theirs again in each depth
    "embed_tokens.weight": "embedding.weight",
    "shared_head.head.weight": "head.weight",
}

COMMON: Mapping[str, Key] = {
    "vocab_size": key("vocab"),
    "hidden_size": key("dim"),
    "num_hidden_layers": key("layers"),
    "num_attention_heads": key("heads"),
    "intermediate_size": key("ffn"),
    "rms_norm_eps": key("norm_eps"),
    "initializer_range": key("init_std", default=0.02),
    "tie_word_embeddings": key("tied", default=False),
}
DENSE: Mapping[str, Any] = {"experts": 0, "dense_layers": 0, "shared_experts": 0}
PARTS = {
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attention.wq": "self_attn.q_proj.weight",
    "attention.wk": "self_attn.k_proj.weight",
    "attention.wv": "self_attn.v_proj.weight",
    "attention.wo": "self_attn.o_proj.weight",
    "attention.bq": "self_attn.q_proj.bias",
    "attention.bk": "self_attn.k_proj.bias",
    "attention.bv": "self_attn.v_proj.bias",
    "attention.bo": "self_attn.o_proj.bias",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "ffn.w_gate": "mlp.gate_proj.weight",
    "ffn.w_up": "mlp.up_proj.weight",
    "ffn.w_down": "mlp.down_proj.weight",
    "ffn.b_gate": "mlp.gate_proj.bias",
    "ffn.b_up": "mlp.up_proj.bias",
    "ffn.b_down": "mlp.down_proj.bias",
}
EXPERTS = {
    "ffn.router": "mlp.gate.weight",
    "experts.w_gate": "mlp.experts.{e}.gate_proj.weight",
    "experts.w_up": "mlp.experts.{e}.up_proj.weight",
    "experts.w_down": "mlp.experts.{e}.down_proj.weight",
}
LATENT = {
    "attention.wq_down": "self_attn.q_a_proj.weight",
    "attention.q_norm.weight": "self_attn.q_a_layernorm.weight",
    "attention.wq_up": "self_attn.q_b_proj.weight",
    "attention.wkv_down": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attention.wkv_up": "self_attn.kv_b_proj.weight",
    "ffn.bias": "mlp.gate.e_score_correction_bias",
    "ffn.shared.w_gate": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared.w_up": "mlp.shared_experts.up_proj.weight",
    "ffn.shared.w_down": "mlp.shared_experts.down_proj.weight",
}
# Their keys of routing in the Qwen way.
ROUTED = {"num_experts": key("experts"), "num_experts_per_tok": key("top_k")}
BIASED = {"attention_bias": key("qkv_bias", "out_bias", default=False)}
DEEPSEEK: Mapping[str, Key] = {
    **COMMON,
    "kv_lora_rank": key("kv_latent"),
    "v_head_dim": key("value_dim"),
    "moe_intermediate_size": key("expert_ffn"),
    "n_routed_experts": key("experts"),
    "n_shared_experts": key("shared_experts"),
    "num_experts_per_tok": key("top_k"),
    "first_k_dense_replace": key("dense_layers"),
    "routed_scaling_factor": key("weight_scale"),
}
DEEPSEEK_LEGAL = {"attention_bias": (False,), "mlp_bias": (False,), "moe_layer_freq": (1,)}
DEEPSEEK_IGNORED = frozenset({"head_dim", "qk_head_dim"})  # of transformers, which computes them
TURNED = {"attention.wq": "heads", "attention.wq_up": "heads", "attention.wkv_down": "latent"}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        {**COMMON, **BIASED, "mlp_bias": key("mlp_bias", default=False)},
        (heads(), rope()),
        DENSE,
        PARTS,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        COMMON,
        (heads(kv_default=32), rope(), window(switched=True, from_layer=True)),
        {**DENSE, "qkv_bias": True},
        PARTS,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {**COMMON, **BIASED},
        (heads(kv_default=32, dim_default=128), rope(), window(switched=True, from_layer=True)),
        {**DENSE, "qk_norm": "head"},
        PARTS,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {
            **COMMON, **BIASED, **ROUTED,
            "moe_intermediate_size": key("expert_ffn"),
            "decoder_sparse_step": key("moe_every", default=1),
            "norm_topk_prob": key("normalize_weights", default=False),
        },
        (heads(kv_default=4), rope(), window(switched=True), leading_dense()),
        {"shared_experts": 0, "qk_norm": "head"},
        {**PARTS, **EXPERTS},
        aliases={"num_local_experts": "num_experts"},
        ignored=frozenset({"max_window_layers"}),
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        {
            **COMMON,
            "intermediate_size": key("expert_ffn"),
            "num_local_experts": key("experts"),
            "num_experts_per_tok": key("top_k"),
        },
        (heads(kv_default=8), rope(base=1e6), window()),
        {"shared_experts": 0, "dense_layers": 0},
        {
            **PARTS,
            "ffn.router": "block_sparse_moe.gate.weight",
            "experts.w_gate": "block_sparse_moe.experts.{e}.w1.weight",
            "experts.w_up": "block_sparse_moe.experts.{e}.w3.weight",
            "experts.w_down": "block_sparse_moe.experts.{e}.w2.weight",
        },
        {"router_jitter_noise": (0.0, None)},
        {"num_experts": "num_local_experts"},
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        {
            **COMMON, **BIASED, **ROUTED,
            "intermediate_size": key("expert_ffn"),
            "norm_topk_prob": key("normalize_weights", default=False),
        },
        (heads(), rope()),
        {"shared_experts": 0, "dense_layers": 0, "qk_norm": "all"},
        {**PARTS, **EXPERTS},
        {"clip_qkv": (None,)},
        {"num_local_experts": "num_experts"},
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {**COMMON, **BIASED},
        (heads(), rope()),
        {**DENSE, "norm": "output", "qk_norm": "all"},
        {
            **PARTS,
            "attention_out_norm.weight": "post_attention_layernorm.weight",
            "ffn_out_norm.weight": "post_feedforward_layernorm.weight",
        },
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        COMMON,
        (heads(), rope(partial=True, scalings=("default",)), window()),
        DENSE,
        {
            **PARTS,
            **{f"attention.w{x}": "self_attn.qkv_proj.weight" for x in "qkv"},
            **{f"ffn.w_{x}": "mlp.gate_up_proj.weight" for x in ("gate", "up")},
        },
        {"resid_pdrop": (0.0, None), "embd_pdrop": (0.0, None)},
        ignored=frozenset({"original_max_position_embeddings"}),
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        {**DEEPSEEK, "first_k_dense_replace": key("dense_layers", default=0),
         "routed_scaling_factor": key("weight_scale", default=1.0)},
        (latent(), rope(softmax=True), groups()),
        {"attention": "mla", "normalize_weights": False},
        {**PARTS, **LATENT, **EXPERTS},
        {**DEEPSEEK_LEGAL, "norm_topk_prob": (False, None), "scoring_func": ("softmax",)},
        {"num_experts": "n_routed_experts"},
        TURNED,
        DEEPSEEK_IGNORED,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        {
            **DEEPSEEK,
            "n_group": key("expert_groups"),
            "topk_group": key("top_groups"),
            "norm_topk_prob": key("normalize_weights", default=True),
        },
        (latent(), rope(softmax=True), nextn()),
        {"attention": "mla", "router_score": "sigmoid", "group_best": 2, "bias_rate": 0.001},  # section 4.2
        {**PARTS, **LATENT, **EXPERTS},
        {
            **DEEPSEEK_LEGAL, "topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",), "rope_interleave": (True,),
        },
        {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
        TURNED,
        DEEPSEEK_IGNORED,
    ),
}  # fmt: skip
