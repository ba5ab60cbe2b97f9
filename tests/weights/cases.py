"""Models of transformers whose gradients equal ours (tests/models), as what both are built from."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor

from research.build import build
from research.config import ModelConfig, RunConfig, TrainConfig, replace
from research.mesh import Mesh
from tests.models import test_hugging_face_dense as dense
from tests.models import test_hugging_face_latent as latent
from tests.models import test_hugging_face_moe as moe

# name -> class of config, what it is given, our keys
ORACLES = {
    **{n: (c, {**dense.SIZES, **g}, {**dense.OURS, **o}) for n, (_, c, g, o) in dense.FAMILIES.items()},
    **{
        n: (c, {**moe.SIZES, "num_hidden_layers": 3, **g}, {**moe.OURS, "model.layers": 3, **o})
        for n, (_, c, g, o) in moe.FAMILIES.items()
        if n != "qwen3"  # of dense, too
    },
    **{n: (c, {**latent.SIZES, **g}, {**latent.OURS, **o}) for n, (_, c, g, o) in latent.FAMILIES.items()},
    "qwen3 moe": (
        transformers.Qwen3MoeConfig,
        {**moe.SIZES, "num_hidden_layers": 3, **moe.FAMILIES["qwen3"][2], "mlp_only_layers": [0]},
        {**moe.OURS, "model.layers": 3, **moe.FAMILIES["qwen3"][3], "model.dense_layers": 1},
    ),
    "olmo2": (
        transformers.Olmo2Config,
        {k: v for k, v in dense.SIZES.items() if k != "head_dim"},
        {**dense.OURS, "model.norm": "output", "model.qk_norm": "all"},
    ),
    "phi3": (
        transformers.Phi3Config,
        {**dense.SIZES, "partial_rotary_factor": 0.5},
        {**dense.OURS, "model.rotary_dim": 4},
    ),
    **{
        f"llama, {n}": (
            transformers.LlamaConfig,
            {**dense.SIZES, "rope_parameters": {"rope_type": n.split()[0], "rope_theta": 5e5, **g}},
            {**dense.OURS, "model.rope_base": 5e5, "model.rope_scaling": n.split()[0], **o},
        )
        for n, (g, o) in dense.SCALINGS.items()
        if n != "ntk" and "mscale" not in g
    },
}


def model_of(changes: Mapping[str, Any]) -> ModelConfig:
    return replace(RunConfig(), {"model.vocab": dense.VOCAB, **changes}).model


class Held:
    """Weights in memory."""

    def __init__(self, model: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
        self.model, self.tensors = model, tensors

    @property
    def meta(self) -> dict[str, Tensor]:
        return {n: t.to("meta") for n, t in self.tensors.items()}

    def read(self, name: str, expert: int | None = None) -> Tensor:
        return self.tensors[name] if expert is None else self.tensors[name][expert]


def random_weights(model: ModelConfig, dtype: torch.dtype = torch.float32) -> Held:
    built = build(RunConfig(model=model, train=TrainConfig()), Mesh({}), torch.device("cpu")).model
    generator = torch.Generator().manual_seed(0)
    values = {}
    for name, parameter in built.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator) * 0.3 + float(parameter.dim() == 1)
        values[name] = drawn.to(dtype)
    return Held(model, values)
