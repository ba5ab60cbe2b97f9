"""Published architectures as sets of `model` keys: `model.preset=deepseek_v3`.

A preset holds what the published configuration says of the architecture; how it was trained (balance losses aside,
where a report states them) is left to the run. tests/models/test_presets.py holds each to its published counts.
"""

from collections.abc import Mapping

Preset = Mapping[str, int | float | bool | str]

DENSE: Preset = {"experts": 0, "head_dim": 128, "norm_eps": 1e-5}
LLAMA_2: Preset = {**DENSE, "vocab": 32000}  # Touvron et al. 2023, table 1 and its config files
LLAMA_3: Preset = {  # Grattafiori et al. 2024, table 3; the scaling of 3.1 from its config files
    **DENSE, "vocab": 128256, "kv_heads": 8, "rope_base": 5e5, "rope_scaling": "llama3", "rope_factor": 8.0,
    "rope_context": 8192, "rope_slow_turns": 1.0, "rope_fast_turns": 4.0,
}  # fmt: skip
MIXTRAL: Preset = {  # Jiang et al. 2024, table 1 and its config files
    "vocab": 32000, "kv_heads": 8, "head_dim": 128, "dense_layers": 0, "experts": 8, "top_k": 2, "shared_experts": 0,
    "norm_eps": 1e-5, "rope_base": 1e6,
}  # fmt: skip
QWEN_3: Preset = {  # Yang et al. 2025, table 2 and its config files
    "vocab": 151936, "kv_heads": 4, "head_dim": 128, "qk_norm": "head", "dense_layers": 0, "experts": 128, "top_k": 8,
    "shared_experts": 0, "norm_eps": 1e-6, "rope_base": 1e6,
}  # fmt: skip
DEEPSEEK: Preset = {  # Dai et al. 2024, section 5.1 and its config file
    "vocab": 102400, "head_dim": 128, "dense_layers": 1, "normalize_weights": False, "norm_eps": 1e-6,
}  # fmt: skip
LATENT: Preset = {  # DeepSeek-V2, sections 3.1.2 and 3.1.4; a head is 128 elements and 64 turned ones
    **DEEPSEEK, "attention": "mla", "head_dim": 192, "rotary_dim": 64, "value_dim": 128, "kv_latent": 512,
    "rope_scaling": "yarn", "rope_factor": 40.0, "rope_context": 4096, "rope_mscale": 0.707, "rope_mscale_all": 0.707,
}  # fmt: skip

PRESETS: Mapping[str, Preset] = {
    "llama2_7b": {**LLAMA_2, "dim": 4096, "layers": 32, "heads": 32, "kv_heads": 32, "ffn": 11008},
    "llama2_13b": {**LLAMA_2, "dim": 5120, "layers": 40, "heads": 40, "kv_heads": 40, "ffn": 13824},
    "llama2_70b": {**LLAMA_2, "dim": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "ffn": 28672},
    "llama3_8b": {**LLAMA_3, "dim": 4096, "layers": 32, "heads": 32, "ffn": 14336},
    "llama3_70b": {**LLAMA_3, "dim": 8192, "layers": 80, "heads": 64, "ffn": 28672},
    "llama3_405b": {**LLAMA_3, "dim": 16384, "layers": 126, "heads": 128, "ffn": 53248},
    "qwen25_72b": {  # Qwen2.5 technical report, table 1 and its config file
        **DENSE, "vocab": 152064, "dim": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "ffn": 29568, "qkv_bias": True,
        "norm_eps": 1e-6, "rope_base": 1e6,
    },
    "mixtral_8x7b": {**MIXTRAL, "dim": 4096, "layers": 32, "heads": 32, "expert_ffn": 14336},
    "mixtral_8x22b": {**MIXTRAL, "dim": 6144, "layers": 56, "heads": 48, "expert_ffn": 16384},
    "qwen3_30b_a3b": {**QWEN_3, "dim": 2048, "layers": 48, "heads": 32, "expert_ffn": 768},
    "qwen3_235b_a22b": {**QWEN_3, "dim": 4096, "layers": 94, "heads": 64, "expert_ffn": 1536},
    "olmoe_1b_7b": {  # Muennighoff et al. 2024, table 10
        "vocab": 50304, "dim": 2048, "layers": 16, "heads": 16, "kv_heads": 16, "head_dim": 128, "qk_norm": "all",
        "dense_layers": 0, "experts": 64, "top_k": 8, "expert_ffn": 1024, "shared_experts": 0,
        "normalize_weights": False, "norm_eps": 1e-5, "balance": 0.01, "z_loss": 0.001,
    },
    "deepseek_moe_16b": {
        **DEEPSEEK, "dim": 2048, "layers": 28, "heads": 16, "kv_heads": 16, "ffn": 10944, "experts": 64, "top_k": 6,
        "expert_ffn": 1408, "shared_experts": 2,
    },
    "deepseek_v2_lite": {  # DeepSeek-V2, appendix B.1
        **LATENT, "dim": 2048, "layers": 27, "heads": 16, "ffn": 10944, "experts": 64, "top_k": 6, "expert_ffn": 1408,
        "shared_experts": 2,
    },
    "deepseek_v2": {
        **LATENT, "dim": 5120, "layers": 60, "heads": 128, "q_latent": 1536, "ffn": 12288, "experts": 160, "top_k": 6,
        "expert_ffn": 1536, "shared_experts": 2, "expert_groups": 8, "top_groups": 3, "weight_scale": 16.0,
    },
    "deepseek_v3": {  # DeepSeek-V3, section 4.2; its multi-token prediction is model.mtp_depth=1
        **LATENT, "vocab": 129280, "dim": 7168, "layers": 61, "heads": 128, "q_latent": 1536, "ffn": 18432,
        "dense_layers": 3, "experts": 256, "top_k": 8, "expert_ffn": 2048, "shared_experts": 1, "expert_groups": 8,
        "top_groups": 4, "group_best": 2, "router_score": "sigmoid", "normalize_weights": True, "weight_scale": 2.5,
        "bias_rate": 0.001, "balance": 1e-4, "balance_scope": "sequence", "z_loss": 0.0, "rope_mscale": 1.0,
        "rope_mscale_all": 1.0,
    },
}  # fmt: skip
