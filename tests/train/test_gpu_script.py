"""What can be known of the GPU script without one."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F

from experiments import gpu
from research.models.kernels import causal_attention, flash_attention
from research.problems import ConfigError
from research.settings import load


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert gpu.gpu([], None) == 0
    assert "no CUDA device" in capsys.readouterr().out


def test_its_proofs_hold_on_the_cpu(capsys):
    assert gpu.proofs("cpu")
    out = capsys.readouterr().out
    assert "bfloat16" in out and "FAIL" not in out


def test_its_proofs_can_fail(monkeypatch):
    monkeypatch.setitem(gpu.TOLERANCES, "float32", 1e-9)
    assert not gpu.proofs("cpu")


def test_its_models_are_valid():
    configs = list(gpu.arms(989.0))
    assert [c.record.arm for c in configs] == ["llama_1b_sdpa", "moe_gpu_sdpa"]


def test_flash_attention_takes_our_shapes(monkeypatch):
    """The package by its documented signature: (B, S, H, h), GQA without repeating, causal; a window counts the tokens
    left and right of a token's own place, -1 means all."""

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
        assert causal and q.shape[-1] == k.shape[-1] == v.shape[-1]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        seen = torch.ones(q.shape[2], q.shape[2]).tril().bool()
        if window_size[0] >= 0:
            seen = seen.triu(-window_size[0])
        return F.scaled_dot_product_attention(q, k, v, seen, scale=softmax_scale, enable_gqa=True).transpose(1, 2)

    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(flash_attn_func=flash_attn_func))
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)
    for window, values in ((0, v), (1, v), (3, v), (9, v), (0, v[..., :3])):
        torch.testing.assert_close(
            flash_attention(q, k, values, 0.3, window), causal_attention(q, k, values, 0.3, window)
        )


def test_flash_attention_is_refused_where_it_cannot_run():
    with pytest.raises(ConfigError) as caught:
        load(None, ["train.kernel=flash", "model.document_mask=true", "train.deterministic=true"])
    assert "train.kernel=flash does not know model.document_mask=true; legal: sdpa, or false" in str(caught.value)
    assert "train.kernel=flash does not know train.dtype=float32; legal: sdpa, or bfloat16" in str(caught.value)
    assert "train.kernel=flash needs the package flash-attn" in str(caught.value)
    assert "is not deterministic, and train.deterministic=true; legal: sdpa, or train.d" in str(caught.value)
