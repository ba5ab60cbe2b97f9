"""Models of the `transformers` package as oracles: the same weights, then loss, logits and gradients of both sides.

Their norms, softmaxes, rotary tables and routers are written for float32 whatever the model's dtype. `widened` makes
those float64 while it is active, so that both sides can be held to 1e-9.
"""

import dataclasses
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from research.build import build
from research.config import RunConfig, TrainConfig, replace
from research.mesh import Mesh
from research.models.batch import NOT_COUNTED, Ahead, Batch
from research.models.params import Block
from research.weights.folder import HuggingFaceFolder

TOLERANCE = 1e-9
BATCH, LENGTH, VOCAB = 3, 24, 50
FLOAT32 = torch.float32  # whatever `widened` makes of the name

PLAIN, TURNED, VALUE = 6, 4, 12  # of a head in latent attention


@dataclasses.dataclass(frozen=True)
class Result:
    loss: Tensor  # with auxiliary losses
    logits: Tensor
    gradients: dict[str, Tensor]  # by our names


@contextmanager
def widened() -> Iterator[None]:
    """float32 is float64, in Python code that names it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("float32", "float"):
            patch.setattr(torch, name, torch.float64)
        patch.setattr(Tensor, "float", Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(FLOAT32)


def batch(ahead: int = 0) -> Batch:
    """The last token of a sample has no target: theirs are shifted inside."""
    tokens = torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))

    def further(places: int, value: int = NOT_COUNTED) -> Tensor:
        return F.pad(tokens[:, places:], (0, places), value=value)

    depths = tuple(Ahead(further(k, 0), further(k + 1)) for k in range(1, ahead + 1))
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    return Batch(tokens, further(1), positions, torch.zeros_like(tokens), ahead=depths)


def on_disk(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By the names and in the form of their files; a depth of multi-token prediction is a layer after the last."""
    found = {}
    for name, tensor in tensors.items():
        if depth := re.match(r"mtp\.layers\.(\d+)\.(mtp_block\.)?", name):
            layer = f"model.layers.{model.config.num_hidden_layers + int(depth[1])}."
            name = layer + name.removeprefix(depth[0]).replace("post_norm.", "shared_head.norm.")
        found[name] = tensor.contiguous()
    return revert_weight_conversion(model, found)


def renamed(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights or gradients of theirs by our names, in our form: as a folder of theirs is read. RoPE has no weights, and
    its tests have scalings that a folder may not ask for."""
    with tempfile.TemporaryDirectory() as folder:
        config = {k: v for k, v in model.config.to_diff_dict().items() if k != "rope_parameters"}
        Path(folder, "config.json").write_text(json.dumps(config))
        save_file(on_disk(model, tensors), Path(folder, "model.safetensors"))
        read = HuggingFaceFolder(Path(folder), mtp=hasattr(model, "mtp"))
        return {name: read.read(name) for name in read.meta}


def theirs(kind: type[PreTrainedModel], config: object) -> tuple[dict[str, Tensor], Result]:
    """Random weights by our names, and what their model makes of `batch()`."""
    torch.manual_seed(0)
    with widened():
        model = kind(config).double()
        for parameter in model.parameters():  # theirs start norms as ones and biases as zeros, which hides errors
            nn.init.normal_(parameter, float(parameter.dim() == 1), 0.3)
        biases = [(n, nn.init.normal_(b)) for n, b in model.named_buffers() if n.endswith("score_correction_bias")]
        tokens = batch().tokens
        out = model(input_ids=tokens, labels=tokens)
        out.loss.backward()
    weights = {n: p.detach() for n, p in [*model.named_parameters(), *biases]}
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    gradients |= {n: torch.zeros_like(b) for n, b in biases}  # ours gives them none
    return renamed(model, weights), Result(out.loss.detach(), out.logits.detach(), renamed(model, gradients))


def ours(weights: Mapping[str, Tensor], changes: Mapping[str, object]) -> Result:
    """What our model makes of the same batch with the same weights."""
    config = replace(RunConfig(train=TrainConfig(dtype="float64")), {"model.vocab": VOCAB, **changes})
    model = build(config, Mesh({}), torch.device("cpu")).model
    assert set(weights) == {n for n, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert parameter.shape == weights[name].shape, name
        parameter.data.copy_(weights[name])
    logits: list[Tensor] = []

    def seen(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        logits.append(F.linear(x, head).detach())
        return seams.cross_entropy(x, head, targets)

    seams = model.head.seams
    for module in model.modules():
        if isinstance(module, Block):
            module.seams = dataclasses.replace(seams, cross_entropy=seen)
    given = batch(config.model.mtp_depth)
    out = model(given)
    loss = out.loss / (given.targets >= 0).sum() + out.aux
    for further, summed in zip(given.ahead, out.ahead, strict=True):
        loss = loss + config.model.mtp_weight * summed / (further.targets >= 0).sum() / len(out.ahead)
    loss.backward()
    return Result(loss.detach(), logits[0], {n: p.grad for n, p in model.named_parameters() if p.requires_grad})


def worst(kind: type[PreTrainedModel], config: object, changes: Mapping[str, object]) -> float:
    """The largest relative error of loss, logits and all gradients, relative to 1e-6 of all where one is zero."""
    weights, want = theirs(kind, config)
    got = ours(weights, changes)
    floor = 1e-6 * torch.stack([g.norm() for g in want.gradients.values()]).norm()
    pairs = [(got.loss, want.loss), (got.logits, want.logits)]
    pairs += [(g, want.gradients[n]) for n, g in got.gradients.items()]
    errors = torch.stack([(a - b).norm() / torch.maximum(b.norm(), floor) for a, b in pairs])
    return float(errors.max())  # NaN if any is
