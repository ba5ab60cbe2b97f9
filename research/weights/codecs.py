"""Parts of a config.json that are more than names: heads, RoPE, windows, latent attention, groups, dense layers.

A codec reads its keys of config.json (by `theirs`) into keys of `model`, and writes them back. What it cannot read it
adds to `problems`. It need not refuse what it cannot write: `configs` reads back what was written.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from research.config import ModelConfig
from research.problems import Problem

Values = dict[str, Any]


@dataclass(frozen=True)
class Codec:
    names: tuple[str, ...]  # keys of config.json that it knows
    read: Callable[[Mapping[str, Any], list[Problem]], Values]
    write: Callable[[ModelConfig], Values]


def heads(kv_default: int | None = None, dim_default: int | None = None) -> Codec:
    """Without `num_key_value_heads` as many as query heads (where null, too), without `head_dim` the width of the
    stream over the heads; a family may have its own numbers for absent ones."""

    def read(theirs: Mapping[str, Any], problems: list[Problem]) -> Values:
        n, dim = theirs.get("num_attention_heads"), theirs.get("hidden_size")
        kv, width = theirs.get("num_key_value_heads", kv_default), theirs.get("head_dim", dim_default)
        if width is None and isinstance(n, int) and isinstance(dim, int) and n > 0:
            width = dim // n
        return {"kv_heads": n if kv is None else kv, "head_dim": width}

    def write(c: ModelConfig) -> Values:
        return {"num_key_value_heads": c.kv_heads, "head_dim": c.head_dim}

    return Codec(("num_key_value_heads", "head_dim"), read, write)


SCALINGS: Mapping[str, tuple[str, Mapping[str, tuple[str, Any]]]] = {
    # their rope_type -> ours, and their key -> our key and what stands for an absent one
    "default": ("none", {}),
    "linear": ("linear", {"factor": ("rope_factor", None)}),
    "llama3": (
        "llama3",
        {
            "factor": ("rope_factor", None),
            "low_freq_factor": ("rope_slow_turns", None),
            "high_freq_factor": ("rope_fast_turns", None),
            "original_max_position_embeddings": ("rope_context", None),
        },
    ),
    "yarn": (
        "yarn",
        {
            "factor": ("rope_factor", None),
            "beta_slow": ("rope_slow_turns", 1.0),
            "beta_fast": ("rope_fast_turns", 32.0),
            "original_max_position_embeddings": ("rope_context", None),
        },
    ),
}
MSCALES = {"mscale": "rope_mscale", "mscale_all_dim": "rope_mscale_all"}  # for `softmax`, both or none


def rope(
    base: float = 10000.0, partial: bool = False, softmax: bool = False, scalings: tuple[str, ...] = tuple(SCALINGS)
) -> Codec:
    """`rope_theta` and `rope_scaling` (transformers 4), or both as `rope_parameters` (5); what is written both read.

    `partial`: part of a head is turned. `softmax`: YaRN's `mscale_all_dim` scales attention as well; elsewhere
    transformers would divide by it and leave attention alone, which is not this model.
    """

    def read(theirs: Mapping[str, Any], problems: list[Problem]) -> Values:
        found = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
        where = "rope_parameters" if theirs.get("rope_parameters") else "rope_scaling"
        if not isinstance(found, Mapping):
            problems.append(Problem(where, found, "is not a mapping"))
            return {}
        given = {k: v for k, v in found.items() if v is not None}
        kind = given.pop("rope_type", given.get("type", "default"))
        given.pop("type", None)
        values: Values = {"rope_base": given.pop("rope_theta", theirs.get("rope_theta", base))}
        share = given.pop("partial_rotary_factor", theirs.get("partial_rotary_factor")) or 1.0
        if partial:
            width = heads().read(theirs, [])["head_dim"]
            values["rotary_dim"] = int(width * share) if isinstance(width, int) else width
        elif share != 1.0:
            problems.append(Problem("partial_rotary_factor", share, "is not known here", "1"))
        if kind not in scalings:
            problems.append(Problem(f"{where}.rope_type", kind, "is not known here", ", ".join(scalings)))
            return values
        return values | _scaled(kind, given, theirs, where, softmax, problems)

    def write(c: ModelConfig) -> Values:
        kind = next((k for k, (ours, _) in SCALINGS.items() if ours == c.rope_scaling), "default")
        values: Values = {"rope_theta": c.rope_base, "rope_scaling": None}
        if kind != "default":
            scaling = {theirs: getattr(c, ours) for theirs, (ours, _) in SCALINGS[kind][1].items()}
            if softmax and c.rope_scaling == "yarn" and c.rope_mscale_all:
                scaling |= {theirs: getattr(c, ours) for theirs, ours in MSCALES.items()}
            values["rope_scaling"] = {"rope_type": kind, "type": kind, **scaling}
        if partial:
            values["partial_rotary_factor"] = c.rotary_width / c.head_dim
        return values

    return Codec(("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"), read, write)


def _scaled(
    kind: str, given: Values, theirs: Mapping[str, Any], where: str, softmax: bool, problems: list[Problem]
) -> Values:
    """Keys of a scaling; `given` holds what is left of theirs."""
    ours, names = SCALINGS[kind]
    values: Values = {"rope_scaling": ours}
    for name, (to, default) in names.items():
        if name == "original_max_position_embeddings":
            default = theirs.get("max_position_embeddings")
        values[to] = given.pop(name, default)
        if values[to] is None:
            problems.append(Problem(f"{where}.{name}", None, f"is missing for {kind}"))
    if kind == "yarn":
        given = {k: v for k, v in given.items() if (k, v) != ("truncate", True)}
        both = [given.pop(name, 0) for name in MSCALES]
        if softmax and all(both):
            values |= dict(zip(MSCALES.values(), both, strict=True))
        elif both[1] or (softmax and both[0] not in (0, 1)):
            rule = "needs mscale beside it" if softmax else "would not reach the softmax of this family"
            problems.append(Problem(f"{where}.mscale_all_dim", both[1], rule, "0"))
    if kind == "default":
        given.pop("original_max_position_embeddings", None)
    problems += [Problem(f"{where}.{name}", v, f"is not known for {kind}") for name, v in given.items()]
    return values


def window(switched: bool = False, from_layer: bool = False) -> Codec:
    """`sliding_window`; `switched`: only where `use_sliding_window`; `from_layer`: the first `max_window_layers` see
    everything, or those that `layer_types` says."""

    def read(theirs: Mapping[str, Any], problems: list[Problem]) -> Values:
        on = theirs.get("use_sliding_window", False) if switched else True
        size = theirs.get("sliding_window", 4096 if switched else None) if on else None
        first = theirs.get("max_window_layers", 28) if from_layer else 0
        types = theirs.get("layer_types")
        if from_layer and size and isinstance(types, list):
            first = types.count("full_attention")
            if types != ["full_attention"] * first + ["sliding_attention"] * (len(types) - first):
                rule = "mixes layers with a window and without"
                problems.append(Problem("layer_types", types, rule, "full_attention first, then sliding_attention"))
        return {"window": size or 0, "window_from": first if size else 0}

    def write(c: ModelConfig) -> Values:
        values: Values = {"sliding_window": c.window or None}
        if switched:
            values["use_sliding_window"] = c.window > 0
        if from_layer:
            values["max_window_layers"] = c.window_from if c.window else c.layers
        return values

    return Codec(("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"), read, write)


def latent() -> Codec:
    """Widths of a head in latent attention; a key has as many heads as a query."""

    def read(theirs: Mapping[str, Any], problems: list[Problem]) -> Values:
        n = theirs.get("num_attention_heads")
        kv = theirs.get("num_key_value_heads")
        if kv not in (None, n):
            problems.append(Problem("num_key_value_heads", kv, f"must be num_attention_heads={n}", str(n)))
        plain, turned = theirs.get("qk_nope_head_dim", 128), theirs.get("qk_rope_head_dim", 64)
        if not isinstance(plain, int) or not isinstance(turned, int):
            problems.append(Problem("qk_nope_head_dim, qk_rope_head_dim", (plain, turned), "must be integers"))
            return {}
        q_latent = theirs.get("q_lora_rank", 1536)
        return {"head_dim": plain + turned, "rotary_dim": turned, "q_latent": q_latent or 0, "kv_heads": n}

    def write(c: ModelConfig) -> Values:
        return {
            "num_key_value_heads": c.heads,
            "qk_nope_head_dim": c.head_dim - c.rotary_dim,
            "qk_rope_head_dim": c.rotary_dim,
            "q_lora_rank": c.q_latent or None,
        }

    return Codec(("num_key_value_heads", "qk_nope_head_dim", "qk_rope_head_dim", "q_lora_rank"), read, write)


def groups() -> Codec:
    """DeepSeek-V2's choice of experts: from all, or from the best groups."""

    def read(theirs: Mapping[str, Any], problems: list[Problem]) -> Values:
        method = theirs.get("topk_method", "greedy")
        if method == "greedy":
            return {"expert_groups": 1, "top_groups": 1}
        if method != "group_limited_greedy":
            problems.append(Problem("topk_method", method, "is not known here", "greedy, group_limited_greedy"))
        return {"expert_groups": theirs.get("n_group"), "top_groups": theirs.get("topk_group")}

    def write(c: ModelConfig) -> Values:
        method = "greedy" if c.expert_groups == 1 else "group_limited_greedy"
        return {"topk_method": method, "n_group": c.expert_groups, "topk_group": c.top_groups}

    return Codec(("topk_method", "n_group", "topk_group"), read, write)


def leading_dense() -> Codec:
    """Qwen's list of dense layers, here the first ones."""

    def read(theirs: Mapping[str, Any], problems: list[Problem]) -> Values:
        layers = theirs.get("mlp_only_layers") or []
        if layers != list(range(len(layers))):
            problems.append(Problem("mlp_only_layers", layers, "must be the first layers", "[], [0], [0, 1], .."))
        return {"dense_layers": len(layers)}

    def write(c: ModelConfig) -> Values:
        return {"mlp_only_layers": list(range(c.dense_layers))}

    return Codec(("mlp_only_layers",), read, write)


def nextn() -> Codec:
    """Depths of multi-token prediction. Without the key there are none, whatever transformers takes for it."""

    def read(theirs: Mapping[str, Any], problems: list[Problem]) -> Values:
        return {"mtp_depth": theirs.get("num_nextn_predict_layers", 0)}

    return Codec(("num_nextn_predict_layers",), read, lambda c: {"num_nextn_predict_layers": c.mtp_depth})
