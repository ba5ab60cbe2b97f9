"""Between config.json of a Hugging Face folder and `ModelConfig`, by the table of families."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from research import settings
from research.config import ModelConfig
from research.problems import ConfigError, Problem, WeightsError
from research.weights.families import FAMILIES, IGNORED, LEGAL, REQUIRED, Family

Values = dict[str, Any]

# Keys of `model` that change neither a weight nor a logit: how it is trained.
TRAINING = ("balance", "balance_scope", "z_loss", "document_mask", "mtp_weight", "preset")
# Keys that mean nothing where the rule holds.
IDLE: tuple[tuple[Callable[[ModelConfig], bool], tuple[str, ...]], ...] = (
    (lambda c: c.attention != "mla", ("value_dim", "kv_latent", "q_latent")),
    (lambda c: c.attention == "mla", ("kv_heads",)),
    (lambda c: c.window == 0, ("window_from",)),
    (lambda c: c.rope_scaling == "none", ("rope_factor",)),
    (lambda c: c.rope_scaling not in ("llama3", "yarn"), ("rope_context", "rope_slow_turns", "rope_fast_turns")),
    (lambda c: c.rope_scaling != "yarn", ("rope_mscale", "rope_mscale_all")),
    (lambda c: c.capacity == 0, ("drop_by",)),
    (lambda c: c.expert_groups == 1, ("top_groups", "group_best")),
    (lambda c: c.experts > 0 and c.dense_layers == 0 and c.moe_every == 1, ("ffn",)),
    (
        lambda c: c.experts == 0,
        (
            "dense_layers", "moe_every", "top_k", "expert_ffn", "shared_experts", "router_score", "normalize_weights",
            "weight_scale", "expert_groups", "top_groups", "group_best", "bias_rate", "capacity", "drop_by", "load",
        ),
    ),
)  # fmt: skip


def read_config(theirs: Mapping[str, Any], what: str = "config.json") -> tuple[str, ModelConfig]:
    """The family (`model_type`) and our model of a config.json.

    Keys that say nothing of a model (token ids, dropout of 0, ..) are passed over, and so are unknown ones that are
    null, false, 0 or empty. Raises WeightsError with every other problem.
    """
    kind = str(theirs.get("model_type"))
    if kind not in FAMILIES:
        raise WeightsError(what, [Problem("model_type", kind, "is not a known family", ", ".join(FAMILIES))])
    values, problems = _values(theirs, FAMILIES[kind])
    if problems:  # what follows from a missing key is no second problem
        values = {k: v for k, v in values.items() if v is not None and v is not REQUIRED}
    try:
        model = settings.from_mapping({"model": values}).model
    except ConfigError as error:
        known = {p.key for p in problems}
        problems += [p for p in error.problems if p.key not in known]
    if problems:
        raise WeightsError(what, problems)
    return kind, model


def _values(theirs: Mapping[str, Any], family: Family) -> tuple[Values, list[Problem]]:
    """Keys of `model` that a config.json sets, whatever rule they break, and what of it cannot be read."""
    problems = list[Problem]()
    theirs = {family.aliases.get(k, k): v for k, v in theirs.items()}
    values: Values = dict(family.settled)
    for name, key in family.keys.items():
        value = theirs.get(name)
        if value is None and key.default is REQUIRED:
            problems.append(Problem(name, None, "is missing"))
        values |= dict.fromkeys(key.ours, key.default if value is None else value)
    for codec in family.codecs:
        values |= codec.read(theirs, problems)
    return values, problems + _unsupported(theirs, family)


def _unsupported(theirs: Mapping[str, Any], family: Family) -> list[Problem]:
    problems = []
    legal = {**LEGAL, **family.legal}
    for name, values in legal.items():
        if (value := theirs.get(name, values[0])) not in values:
            rule = "is a quantised checkpoint" if name == "quantization_config" else "is not supported"
            told = ", ".join("null" if v is None else str(v).lower() for v in values)
            problems.append(Problem(name, value, rule, told))
    known = {*legal, *family.keys, *IGNORED, *family.ignored, *(n for c in family.codecs for n in c.names)}
    for name, value in theirs.items():
        if name not in known and value not in (None, False, 0, "", [], {}):
            rule = "is not known: it may change the model"
            problems.append(Problem(name, value, rule, "no such key, if it does not"))
    return problems


def write_config(model: ModelConfig, kind: str, positions: int) -> Values:
    """config.json of a model that fits the family; `positions`: `max_position_embeddings`, or what RoPE is scaled to
    if that is more. Keys are those of transformers 4, which 5 reads as well; token ids are left to the caller."""
    family = FAMILIES[kind]
    if model.rope_scaling in ("llama3", "yarn"):
        positions = max(positions, int(model.rope_context * model.rope_factor))
    model = _plain_base(model)
    values: Values = {"architectures": [family.architecture], "model_type": kind, "max_position_embeddings": positions}
    values |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    values |= {name: getattr(model, key.ours[0]) for name, key in family.keys.items()}
    for codec in family.codecs:
        values |= codec.write(model)
    return values | {k: v[0] for k, v in {**LEGAL, **family.legal}.items() if v[0] is not None}


def misfits(model: ModelConfig, kind: str) -> list[Problem]:
    """What of a model a family cannot say: all keys that are not read back as they were written. What was read back
    need not be a model that follows the rules."""
    values, unreadable = _values(write_config(model, kind, positions=1), FAMILIES[kind])
    want, got = canonical(model), canonical(dataclasses.replace(ModelConfig(), **values))
    follows = _idle(want) | _idle(got)  # what means something to one of both only, because another key differs
    differ = [
        Problem(f"model.{f.name}", value, f"is not possible in {kind}", str(getattr(got, f.name)).lower())
        for f in dataclasses.fields(ModelConfig)
        if (value := getattr(want, f.name)) != getattr(got, f.name) and f.name not in follows
    ]
    return differ or unreadable


def family_of(model: ModelConfig) -> str:
    """The first family that the model fits; raises WeightsError with what keeps it from the nearest one, which is dense
    or not as the model is."""
    found = {kind: misfits(model, kind) for kind in FAMILIES}
    if fits := [kind for kind in FAMILIES if not found[kind]]:
        return fits[0]
    alike = [k for k, family in FAMILIES.items() if (family.settled.get("experts") == 0) == (model.experts == 0)]
    kind = min(alike, key=lambda k: len(found[k]))
    raise WeightsError(f"the model, which fits no family; nearest is {kind}", found[kind])


def canonical(model: ModelConfig) -> ModelConfig:
    """The model with one value for all that mean the same; how it is trained is left out."""
    default = ModelConfig()
    model = _plain_base(model)
    idle = _idle(model) | set(TRAINING)
    changes: Values = {name: getattr(default, name) for name in idle}
    if "bias_rate" not in idle:
        changes["bias_rate"] = 0.001 if model.bias_rate else 0.0  # a bias or none
    if model.window_from >= model.layers:
        changes |= {"window": 0, "window_from": default.window_from}
    return dataclasses.replace(model, **{"rotary_dim": model.rotary_width, **changes})


def _idle(model: ModelConfig) -> set[str]:
    return {name for rule, names in IDLE if rule(model) for name in names}


def _plain_base(model: ModelConfig) -> ModelConfig:
    """NTK scaling is another base; theirs of that name grows with each text."""
    if model.rope_scaling != "ntk":
        return model
    width = model.rotary_width
    base = model.rope_base * model.rope_factor ** (width / (width - 2))
    return dataclasses.replace(model, rope_scaling="none", rope_base=base, rope_factor=1.0)
