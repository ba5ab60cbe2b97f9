"""Between the tensors of a Hugging Face folder and our parameters: names, shapes, order of rows.

Each of theirs is made of boxes of ours, one after another along dim 0: one expert of a stack, queries, keys and values
of one matrix. `Theirs` says which; `joined` and `parted` turn one into the other, bit by bit.

E experts, h elements of a head, R of them turned
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from research.config import ModelConfig
from research.models.decoder import Decoder, specs
from research.models.params import Spec
from research.weights.families import DEPTH, DEPTH_COPIES, FAMILIES, WHOLE, Family


class Part(NamedTuple):
    """A box of one of our parameters: all of it, or what `expert` holds."""

    name: str
    expert: int | None
    rows: int  # its size along dim 0


@dataclass(frozen=True)
class Theirs:
    """One tensor of theirs. `turned`: how its rows differ from ours (`order_of`). A `copy` holds what another does."""

    name: str
    parts: tuple[Part, ...]
    shape: tuple[int, ...]
    turned: str = ""
    keep_float32: bool = False
    copy: bool = False


Plan = dict[str, Theirs]  # by their name, in the order of our parameters


def plan(model: ModelConfig, kind: str) -> tuple[Plan, dict[str, Spec]]:
    """All tensors of theirs that a model of this family has, and our declarations by full name."""
    with torch.device("meta"):
        declared = specs(Decoder(model))
    family, found = FAMILIES[kind], Plan()
    for name, spec in declared.items():
        stacked = "expert" in spec.dims
        template, turned = _theirs_of(name, stacked, model, family)
        for expert in range(spec.shape[0]) if stacked else [None]:
            shape = spec.shape[1:] if stacked else spec.shape
            part = Part(name, expert, shape[0])
            theirs = template.format(e=expert)
            before = found[theirs].parts if theirs in found else ()
            rows = sum(p.rows for p in (*before, part))
            found[theirs] = Theirs(theirs, (*before, part), (rows, *shape[1:]), turned, spec.keep_float32)
    return {**found, **dict(_copies(found, model))}, declared


def _theirs_of(name: str, stacked: bool, model: ModelConfig, family: Family) -> tuple[str, str]:
    """Template of their name, and how the rows differ."""
    if name in WHOLE:
        return WHOLE[name], ""
    where, number, leaf = name.split(".", 2)
    layer = int(number) if where == "layers" else model.layers + int(number) - 1
    prefix = f"model.layers.{layer}."
    if where == "mtp":
        if leaf in DEPTH:
            return prefix + DEPTH[leaf], ""
        leaf = leaf.removeprefix("layer.")
    if stacked:
        leaf = leaf.replace("ffn.", "experts.")
    return prefix + family.layer[leaf], family.turned.get(leaf, "")


def _copies(found: Plan, model: ModelConfig) -> Iterator[tuple[str, Theirs]]:
    depths = {m[1] for name in found if (m := re.match(r"(model\.layers\.\d+\.)eh_proj", name))}
    for prefix in sorted(depths):
        for leaf, ours in DEPTH_COPIES.items():
            source = found[WHOLE["embedding.weight" if model.tied else ours]]
            name = prefix + leaf
            yield name, Theirs(name, source.parts, source.shape, copy=True)


def order_of(turned: str, model: ModelConfig) -> Tensor:
    """Where each row of a unit of ours stands in theirs. Theirs have the turned elements last, neighbours as pairs;
    ours first, halves as pairs (`rotate` in models/rope.py). The unit is a head, or the latent with its turned key."""
    width, plain = model.rotary_dim, model.kv_latent if turned == "latent" else model.head_dim - model.rotary_dim
    pairs = torch.cat([plain + torch.arange(0, width, 2), plain + torch.arange(1, width, 2)])
    return torch.cat([torch.arange(plain), pairs] if turned == "latent" else [pairs, torch.arange(plain)])


def joined(of: Theirs, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
    """Boxes of ours -> their tensor."""
    whole = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
    return _rows(whole, order_of(of.turned, model).argsort()) if of.turned else whole


def parted(of: Theirs, whole: Tensor, model: ModelConfig) -> dict[Part, Tensor]:
    """Their tensor -> boxes of ours."""
    if of.turned:
        whole = _rows(whole, order_of(of.turned, model))
    return dict(zip(of.parts, whole.split([p.rows for p in of.parts]), strict=True))


def _rows(tensor: Tensor, order: Tensor) -> Tensor:
    return tensor.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1)


Read = Callable[[str, int | None], Tensor]  # name of ours, expert or None for all -> its values


def to_theirs(read: Read, of: Theirs, model: ModelConfig) -> Tensor:
    return joined(of, [read(p.name, p.expert) for p in of.parts], model)


def sources(of: Plan) -> Mapping[str, dict[int | None, Theirs]]:
    """Our name -> expert (None: not stacked) -> their tensor that holds it."""
    found: dict[str, dict[int | None, Theirs]] = {}
    for theirs in of.values():
        if not theirs.copy:
            for part in theirs.parts:
                found.setdefault(part.name, {})[part.expert] = theirs
    return found
