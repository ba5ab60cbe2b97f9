"""Attention to some keys: each kernel against a plain softmax, and parts that merge to the whole."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F

from research.models import partial_attention
from research.models.partial_attention import _Kernel, attention_part, attention_part_gradients

SCALE = 0.4
SHAPES = [(4, 4, 8, 8), (4, 2, 8, 6), (6, 1, 4, 7)]  # heads, kv heads, width of queries and keys, and of values


def case(shape, queries, keys, dtype=torch.float64):
    heads, kv_heads, width, value_width = shape
    generator = torch.Generator().manual_seed(0)
    sizes = [
        (queries, heads, width),
        (keys, kv_heads, width),
        (keys, kv_heads, value_width),
        (queries, heads, value_width),
    ]
    return [torch.randn(2, *size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def reference(q, k, v, do, causal):
    """Output, log-sum-exp and gradients, over the whole square in float64."""
    q, k, v = (t.double().requires_grad_() for t in (q, k, v))
    copies = q.shape[2] // k.shape[2]
    scores = torch.einsum("bqhd,bkhd->bqhk", q, k.repeat_interleave(copies, 2)) * SCALE
    if causal:
        later = torch.ones(q.shape[1], k.shape[1]).triu(1).bool()
        scores = scores.masked_fill(later[:, None], -torch.inf)
    o = torch.einsum("bqhk,bkhd->bqhd", scores.softmax(-1), v.repeat_interleave(copies, 2))
    o.backward(do.double())
    return [o.detach(), scores.logsumexp(-1).detach(), q.grad, k.grad, v.grad]


def flash_attn_stand_in():
    """The two functions of flash-attn 2.7 and later that are called, by the CPU kernel: (B, S, H, h), lse (B, H, S)."""
    interface = types.ModuleType("flash_attn.flash_attn_interface")

    def forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
                return_softmax):  # fmt: skip
        assert (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes) == (0.0, -1, -1, 0.0, None)
        o, lse = partial_attention._cpu(*(t.transpose(1, 2) for t in (q, k, v)), softmax_scale, causal)
        return o.transpose(1, 2), lse.contiguous(), None, None

    def backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
                 window_size_right, softcap, alibi_slopes, deterministic, rng_state=None):  # fmt: skip
        assert (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes) == (0.0, -1, -1, 0.0, None)
        given = (t.transpose(1, 2) for t in (dout, q, k, v, out))
        found = partial_attention._cpu_backward(*given, softmax_lse, softmax_scale, causal)
        for into, t in zip((dq, dk, dv), found, strict=True):
            into.copy_(t.transpose(1, 2))

    interface._flash_attn_forward, interface._flash_attn_backward = forward, backward
    return {"flash_attn": types.ModuleType("flash_attn"), "flash_attn.flash_attn_interface": interface}


@pytest.fixture(params=["cpu", "plain", "flash"])
def kernel(request, monkeypatch):
    """Which of them runs; `flash` as the argument of the functions."""
    if request.param == "plain":
        plain = _Kernel(partial_attention._plain, partial_attention._plain_backward)
        monkeypatch.setattr(partial_attention, "_kernel", lambda q, flash: plain)
        monkeypatch.setattr(partial_attention, "SCORES", 500)  # a few queries at a time
    for name, module in flash_attn_stand_in().items():
        monkeypatch.setitem(sys.modules, name, module)
    return request.param == "flash"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("queries, keys, causal", [(9, 9, True), (9, 9, False), (5, 12, False), (12, 1, False)])
def test_equals_a_plain_softmax(kernel, shape, queries, keys, causal):
    q, k, v, do = case(shape, queries, keys)
    how = {"scale": SCALE, "causal": causal, "flash": kernel}
    o, lse = attention_part(q, k, v, **how)
    found = [o, lse, *attention_part_gradients(do, q, k, v, o, lse, **how)]
    for got, want in zip(found, reference(q, k, v, do, causal), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_slices_of_wider_tensors(kernel):
    """Keys and values side by side in one buffer, as they travel, and some of the queries."""
    q, k, v, do = case((4, 2, 8, 8), 12, 7)
    kv = torch.cat([k, v], -1)
    how = {"scale": SCALE, "causal": False, "flash": kernel}
    o, lse = attention_part(q[:, 3:], kv[..., :8], kv[..., 8:], **how)
    found = [o, lse, *attention_part_gradients(do[:, 3:], q[:, 3:], kv[..., :8], kv[..., 8:], o, lse, **how)]
    for got, want in zip(found, reference(q[:, 3:], k, v, do[:, 3:], False), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_log_sum_exp_is_wide(kernel, dtype, tolerance):
    q, k, v, do = case((4, 2, 16, 16), 9, 9, dtype)
    how = {"scale": SCALE, "causal": True, "flash": kernel}
    o, lse = attention_part(q, k, v, **how)
    assert o.dtype == dtype
    found = [o, lse, *attention_part_gradients(do, q, k, v, o, lse, **how)]
    for got, want in zip(found, reference(q, k, v, do, True), strict=True):
        assert F.mse_loss(got.double(), want).sqrt() < tolerance * want.norm()
