"""A model at rest: a checkpoint of any layout, or a Hugging Face folder. Each rank reads its own boxes."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from research.build import build
from research.built import DTYPES, Built, dtype_name
from research.config import RunConfig, Value
from research.mesh import Box, Layout, Mesh
from research.models.decoder import Decoder, specs
from research.models.params import Spec
from research.problems import Problem, WeightsError
from research.train.checkpoint.index import find
from research.train.checkpoint.whole import StoredWeights
from research.weights.files import CONFIG, GENERATION, TOKENIZER, read_json
from research.weights.folder import HuggingFaceFolder

NO_BATCH = {"global_batch": 2**16}  # rules of training about the batch shall not speak
WITHOUT = ("mtp_depth", "capacity")
POSITIONS = 2048  # of a folder that does not say it
SOURCES = "the folder of a checkpoint, of a run or a Hugging Face folder"


@dataclass(frozen=True)
class Source:
    """`keys`: what it says of the config. `verify(part, parts)` reads checksums, where there are any."""

    place: Path
    keys: Mapping[str, Mapping[str, Any]]
    shapes: Mapping[str, Sequence[int]]
    read: Callable[[str, Box], Tensor]
    verify: Callable[[int, int], None] = lambda part, parts: None
    corpus: str | None = None  # digest of the text that one of our runs was trained on
    ends: tuple[int, ...] = ()  # ids that end a text, beside the tokenizer's own
    left_out: Mapping[str, Value] = field(default_factory=dict)  # keys of training that generation does without


def open_source(place: Path) -> Source:
    """Raises WeightsError or CheckpointError with what is wrong with its files."""
    return _folder(place) if (place / CONFIG).is_file() else _checkpoint(find(place, SOURCES))


def _folder(place: Path) -> Source:
    folder = HuggingFaceFolder(place, mtp=False)
    data = {"tokenizer": str(place / TOKENIZER), "sequence": folder.positions or POSITIONS}
    train = {"dtype": dtype_name(folder.meta["embedding.weight"].dtype), **NO_BATCH}
    keys = {"model": dataclasses.asdict(folder.model), "data": data, "train": train}
    shapes = {name: tuple(t.shape) for name, t in folder.meta.items()}
    return Source(place, keys, shapes, folder.read_box, ends=_ends(place))


def _ends(place: Path) -> tuple[int, ...]:
    """What generation_config.json says, where there is one."""
    said = read_json(place / GENERATION).get("eos_token_id") if (place / GENERATION).is_file() else None
    ends = said if isinstance(said, list) else [] if said is None else [said]
    if not all(isinstance(i, int) for i in ends):
        rule = f"in {GENERATION} is no id"
        raise WeightsError(str(place), [Problem("eos_token_id", said, rule, "an integer, a list of them, or null")])
    return tuple(ends)


def _checkpoint(place: Path) -> Source:
    stored = StoredWeights(place, verify=False)
    said = stored.config
    model = {k: v for k, v in said["model"].items() if k not in ("preset", *WITHOUT)}
    left_out = {f"model.{k}": v for k in WITHOUT if (v := said["model"].get(k))}
    train = {"dtype": said["train"]["dtype"], **NO_BATCH}
    keys = {"model": model, "data": said["data"], "train": train}
    shapes = {name: e.shape for name, e in stored.entries.items() if not name.startswith("mtp.")}
    return Source(stored.folder, keys, shapes, stored.read, stored.verify, stored.corpus, left_out=left_out)


def require_fit(source: Source, config: RunConfig) -> None:
    """Raises WeightsError with every weight that this config does not find, or not in this shape."""
    with torch.device("meta"):
        declared = specs(Decoder(config.model))
    if problems := list(_misfits(source, declared)):
        raise WeightsError(str(source.place), problems)


def _misfits(source: Source, declared: Mapping[str, Spec]) -> Iterator[Problem]:
    yield from (Problem(n, None, "is missing") for n in declared if n not in source.shapes)
    for name, shape in source.shapes.items():
        if name not in declared:
            yield Problem(name, None, "is no part of this model")
        elif tuple(shape) != declared[name].shape:
            yield Problem(name, list(shape), "has another shape", str(list(declared[name].shape)))


def load(source: Source, config: RunConfig, mesh: Mesh, device: torch.device) -> Built:
    """The model of this rank, its weights in the run's dtype but those that stay float32."""
    return build(config, mesh, device, partial(_padded_box, source.read, DTYPES[config.train.dtype], mesh, device))


def _padded_box(
    read: Callable[[str, Box], Tensor],
    dtype: torch.dtype,
    mesh: Mesh,
    device: torch.device,
    name: str,
    spec: Spec,
    layout: Layout,
) -> Tensor:
    box = layout.box(mesh.at)
    dtype = torch.promote_types(dtype, torch.float32) if spec.keep_float32 else dtype
    local = torch.zeros(layout.local_shape(), dtype=dtype, device=device)
    local[tuple(slice(size) for _, size in box)] = read(name, box).to(device)
    return local
