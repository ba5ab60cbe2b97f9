"""Floating-point operations of the model: a closed formula, and a counter that must agree with it.

L layers, H heads, h head dim, v of values, S tokens of a sample
"""

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from research.config import ModelConfig
from research.models.params import Spec
from research.models.products import ONEDNN


def flops_per_token(c: ModelConfig, declared: Mapping[str, Spec], sequence: int, causal: bool) -> int:
    """Forward and backward of one token: 6 for each matrix element that it is multiplied with, and
    6 L H (h + v) S for attention over the whole sample (Chowdhery et al. 2022, appendix B), or half of that where
    `causal`; there a layer with a window w counts w - w^2 / 2S seen tokens in place of S / 2.

    The input embedding is looked up, not multiplied; a tied one counts as the head. Of the routed experts the chosen
    ones count. A depth of multi-token prediction has a layer like the last one, and multiplies with the head once more.
    Recompute does not count: the work is the model's, whatever the run does for it.
    """
    return sum(flops_by_part(c, declared, sequence, causal).values())


def flops_by_part(c: ModelConfig, declared: Mapping[str, Spec], sequence: int, causal: bool) -> dict[str, int]:
    """The same of each part, in the order of forward: embedding, layers.0, ..., head; depths of multi-token prediction
    are the head's."""
    parts = {"embedding": 0, **{f"layers.{i}": 0 for i in range(c.layers)}, "head": 0}
    parts["head"] += 6 * c.mtp_depth * declared["embedding.weight" if c.tied else "head.weight"].numel
    for name, spec in declared.items():
        if len(spec.dims) > 1 and (name != "embedding.weight" or c.tied):
            met = spec.numel * c.top_k // c.experts if "expert" in spec.dims else spec.numel
            parts[".".join(name.split(".")[:2]) if name.startswith("layers.") else "head"] += 6 * met
    for layer, part in [*enumerate(list(parts)[1:-1]), *[(c.layers - 1, "head")] * c.mtp_depth]:
        window = min(c.window_of(layer) or sequence, sequence)
        seen = Fraction(2 * window * sequence - window**2, 2 * sequence) if causal else sequence
        parts[part] += int(6 * c.heads * (c.head_dim + c.value_width) * seen)
    return parts


def counter() -> FlopCounterMode:
    """torch's counter, taught the operators it does not see; attention counts the whole square, as it does on CUDA."""
    ops = torch.ops.aten
    formulas: dict[Any, Callable[..., int]] = {
        ops._grouped_mm: _grouped,
        ops._scaled_dot_product_flash_attention_for_cpu: _attention,
        ops._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    }
    if ONEDNN is not None:
        formulas[ONEDNN] = _linear
    return FlopCounterMode(display=False, custom_mapping=formulas)


def _grouped(a, b, *args, out_shape=None, **kwargs) -> int:  # type: ignore[no-untyped-def]
    """(N, I) x (E, I, O), or (I, N) x (N, O) -> (E, I, O): 2 N I O either way."""
    return 2 * math.prod(a) * b[-1]


def _linear(x, w, *args, out_shape=None, **kwargs) -> int:  # type: ignore[no-untyped-def]
    """(.., I) x (O, I)"""
    return 2 * math.prod(x) * w[0]


def _attention(q, k, v, *args, out_shape=None, **kwargs) -> int:  # type: ignore[no-untyped-def]
    """q (B, H, S, h), k and v (B, G, T, h): two products of 2 B H S T h."""
    batch, heads, length, width = q
    return 2 * batch * heads * length * k[2] * (width + v[3])


def _attention_backward(dy, q, k, v, *args, out_shape=None, **kwargs) -> int:  # type: ignore[no-untyped-def]
    """dv, dp, dq, dk: four products. What a kernel computes again to save memory is not the model's work."""
    return 2 * _attention(q, k, v)
