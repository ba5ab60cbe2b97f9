"""A bfloat16 run scores and selects in float32: logits that bfloat16 cannot tell apart choose the right expert."""

import torch

from research.config import RunConfig, replace
from research.mesh import Mesh
from research.models import moe
from research.models.moe import MoE
from research.models.rope import Places, Rotary
from research.train.loop import Trainer


def chosen(monkeypatch):
    changes = {"train.dtype": "bfloat16", "model.layers": 1, "model.dense_layers": 0, "model.top_k": 1}
    config = replace(RunConfig(), {**changes, "model.bias_rate": 0.001, "model.router_score": "sigmoid"})
    model = Trainer(config, Mesh({}), torch.device("cpu")).built.model
    (layer,) = (m for m in model.modules() if isinstance(m, MoE))
    assert layer.w_gate.dtype == torch.bfloat16
    layer.router.data.zero_()
    layer.router.data[[0, 3], 0] = torch.tensor([1.0, 1.001], dtype=layer.router.dtype)
    layer.bias.data[5] = 0.25  # to 0.75 with the sigmoid of 0: 0.731 and 0.7313 are those of the two above
    seen = []
    monkeypatch.setattr(moe, "choose", lambda scores, c, real=moe.choose: seen.append(real(scores, c)) or seen[-1])
    x = torch.zeros(1, 4, config.model.dim, dtype=torch.bfloat16)
    x[..., 0] = 1
    at = Places(torch.arange(4)[None], None, Rotary(x, x), None, whole_tokens=4)
    layer(x, at, lambda compute: compute())
    layer.bias.data[5] = 0
    layer(x, at, lambda compute: compute())
    return [ids.unique().tolist() for ids in seen], (layer.router.dtype, layer.bias.dtype)


def test_close_logits_choose_the_right_expert(monkeypatch):
    assert chosen(monkeypatch) == ([[5], [3]], (torch.float32, torch.float32))


def test_planted_bfloat16_router(monkeypatch):
    param = MoE.param
    monkeypatch.setattr(
        MoE, "param", lambda self, name, keep_float32=False, **given: param(self, name, keep_float32=False, **given)
    )
    assert chosen(monkeypatch)[0] != [[5], [3]]
