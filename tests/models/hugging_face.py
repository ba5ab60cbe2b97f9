"""Models of the `transformers` package as oracles: the same weights, then loss, logits and gradients of both sides.

Their norms, softmaxes, rotary tables and routers are written for float32 whatever the model's dtype. `widened` makes
those float64 while it is active, so that both sides can be held to 1e-9.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from research.build import build
from research.config import RunConfig, TrainConfig, replace
from research.mesh import Mesh
from research.models.batch import NOT_COUNTED, Ahead, Batch
from research.models.params import Block

TOLERANCE = 1e-9
BATCH, LENGTH, VOCAB = 3, 24, 50
FLOAT32 = torch.float32  # whatever `widened` makes of the name

PLAIN, TURNED, VALUE = 6, 4, 12  # of a head in latent attention

# theirs -> ours; the tensors are the same but for those of `_converted`
NAMES = [
    (r"^model\.embed_tokens\.", "embedding."),
    (r"^model\.norm\.", "head.norm."),
    (r"^lm_head\.", "head."),
    (r"^model\.", ""),
    (r"^mtp\.layers\.0\.", "mtp.1."),
    (r"^mtp\.layers\.1\.", "mtp.2."),
    (r"\.enorm\.", ".embedding_norm."),
    (r"\.hnorm\.", ".hidden_norm."),
    (r"\.eh_proj\.weight", ".projection"),
    (r"\.mtp_block\.", ".layer."),
    (r"\.post_norm\.", ".norm."),
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.post_feedforward_layernorm\.", ".ffn_out_norm."),
    (r"\.self_attn\.(q|kv)_a_proj(_with_mqa)?\.weight", r".attention.w\1_down"),
    (r"\.self_attn\.(q|kv)_b_proj\.weight", r".attention.w\1_up"),
    (r"\.self_attn\.(q|kv)_a_layernorm\.", r".attention.\1_norm."),
    (r"\.self_attn\.(\w)_proj\.weight", r".attention.w\1"),
    (r"\.self_attn\.(\w)_proj\.bias", r".attention.b\1"),
    (r"\.self_attn\.", ".attention."),
    (r"\.mlp\.gate\.weight", ".ffn.router"),
    (r"\.mlp\.gate\.e_score_correction_bias", ".ffn.bias"),
    (r"\.mlp\.shared_experts\.", ".ffn.shared."),
    (r"\.mlp\.experts\.down_proj", ".ffn.w_down"),
    (r"\.mlp\.experts\.", ".ffn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.(gate|up|down)_proj\.weight", r".w_\1"),
    (r"\.(gate|up|down)_proj\.bias", r".b_\1"),
]


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


def renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights or gradients of theirs by our names, in our form."""
    latent = any("kv_a_proj" in name for name in tensors)
    outputs = any("post_feedforward" in name for name in tensors)
    ours: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for pattern, new in NAMES:
            name = re.sub(pattern, new, name)
        if outputs:  # what Llama calls post-attention comes before the feed-forward
            name = name.replace(".ffn_norm.", ".attention_out_norm.")
        ours |= _parted(name, tensor)
    return {name: _reordered(name, t) if latent else t for name, t in ours.items()}


def _parted(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Matrices that they keep in one, apart."""
    part, _, last = name.removesuffix(".weight").rpartition(".")
    if last == "qkv_proj":  # of Phi-3, with twice as many query heads as kv heads
        quarter = len(tensor) // 4
        parts = tensor.split([2 * quarter, quarter, quarter])
        return dict(zip((f"{part}.wq", f"{part}.wk", f"{part}.wv"), parts, strict=True))
    if last == "gate_up_proj":
        return dict(zip((f"{part}.w_gate", f"{part}.w_up"), tensor.chunk(2, -2), strict=True))
    return {name: tensor}


def _reordered(name: str, tensor: Tensor) -> Tensor:
    """Rows of latent attention. They turn the last elements of a head, neighbours as pairs."""
    if name.endswith(("wq", "wq_up")):
        plain, turned = tensor.unflatten(0, (-1, PLAIN + TURNED)).split([PLAIN, TURNED], 1)
        return torch.cat([turned[:, 0::2], turned[:, 1::2], plain], 1).flatten(0, 1)
    if name.endswith("wkv_down"):
        latent, turned = tensor.split([len(tensor) - TURNED, TURNED])
        return torch.cat([latent, turned[0::2], turned[1::2]])
    return tensor


def theirs(kind: type[nn.Module], config: object) -> tuple[dict[str, Tensor], Result]:
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
    return renamed(weights), Result(out.loss.detach(), out.logits.detach(), renamed(gradients))


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


def worst(kind: type[nn.Module], config: object, changes: Mapping[str, object]) -> float:
    """The largest relative error of loss, logits and all gradients, relative to 1e-6 of all where one is zero."""
    weights, want = theirs(kind, config)
    got = ours(weights, changes)
    floor = 1e-6 * torch.stack([g.norm() for g in want.gradients.values()]).norm()
    pairs = [(got.loss, want.loss), (got.logits, want.logits)]
    pairs += [(got.gradients[n], g) for n, g in want.gradients.items()]
    errors = torch.stack([(a - b).norm() / torch.maximum(b.norm(), floor) for a, b in pairs])
    return float(errors.max())  # NaN if any is
