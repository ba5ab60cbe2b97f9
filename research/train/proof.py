"""The proof that a layout computes what one process computes: loss, every gradient, the norm, the weights.

Each rank leaves a snapshot; `compare` holds every copy of every box on every rank against the whole tensors of one
process. It is run in float64, where rounding is far below any real fault.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from research.config import AXIS_SECTIONS, RunConfig
from research.data.tokens import open_tokens
from research.launch.local import start
from research.launch.process import Place
from research.mesh import Box, Mesh, total_ranks
from research.models.batch import NOT_COUNTED, Batch
from research.train.loop import Trainer
from research.train.run import global_batches

TOLERANCE = 1e-9
FLOOR = 1e-6  # of the norm over all parameters: exact zeros compare too
STEPS = 5  # at most

Boxes = dict[str, tuple[Box, Tensor]]  # full name -> box and local tensor


@dataclass(frozen=True)
class Snapshot:
    """What one rank saw in each step, and its weights after the last one."""

    losses: list[tuple[float, ...]]  # cross-entropy, auxiliary loss, gradient norm, cross-entropy of each MTP depth
    gradients: list[Boxes]
    weights: Boxes


@dataclass(frozen=True)
class Finding:
    """One compared quantity: its relative error, and where it is worst."""

    what: str
    name: str
    error: float

    @property
    def passed(self) -> bool:
        return self.error <= TOLERANCE  # False for NaN


def reference_of(config: RunConfig) -> RunConfig:
    """The same training on one process, without anything that shall not change its result."""
    axes = {a: type(getattr(config, a))() for a in AXIS_SECTIONS if hasattr(config, a)}
    plain = {a: dataclasses.replace(section, degree=1) for a, section in axes.items()}
    train = dataclasses.replace(config.train, recompute="none", kernel="sdpa", bucket_mib=RunConfig().train.bucket_mib)
    return dataclasses.replace(config, train=train, **plain)


def snapshots(config: RunConfig, folder: Path, limit_s: float | None = None) -> Iterator[Snapshot]:
    """Start the ranks of a config, let them train, and read their snapshots one after another."""
    torch.set_num_threads(1)  # this process computes too, and ranks are forked from it
    folder.mkdir(parents=True)
    for path in start(partial(snapshot, config, folder), total_ranks(config), config.launch, limit_s):
        yield Snapshot(*torch.load(path, weights_only=True, map_location="cpu"))


def snapshot(config: RunConfig, folder: Path, place: Place, device: torch.device) -> Path:
    """Train a few steps on this rank and leave the snapshot in a file of `folder`."""
    mesh = Mesh.from_config(config, place.world, place.rank)
    batches = global_batches(config, open_tokens(config.data))
    trainer = Trainer(config, mesh, device)
    losses, gradients = [], []
    for step in range(min(config.train.steps, STEPS)):
        sums = trainer.backward([ignore_some(b, step) for b in batches.microbatches_of(step)])
        gradients.append({n: (box, g.clone()) for n, box, g in trainer.storage.gradients()})
        (loss, aux, *ahead, norm), _ = trainer.update(step, sums)
        losses.append((loss, aux, norm, *ahead))
    weights = {n: (box, w.clone()) for n, box, w in trainer.storage.weights()}
    path = folder / f"{place.rank}.pt"
    torch.save((losses, gradients, weights), path)
    return path


def ignore_some(batch: Batch, seed: int) -> Batch:
    """Leave out targets, more of them in later samples: ranks then count unequal numbers of tokens, and a loss that is
    an average of averages shows."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.linspace(0, 0.5, len(batch.targets))[:, None]

    def some(targets: Tensor) -> Tensor:
        return targets.masked_fill(torch.rand(targets.shape, generator=generator) < share, NOT_COUNTED)

    ahead = (dataclasses.replace(a, targets=some(a.targets)) for a in batch.ahead)
    return dataclasses.replace(batch, targets=some(batch.targets), ahead=tuple(ahead))


def compare(reference: Snapshot, ranks: Iterable[Snapshot]) -> list[Finding]:
    """All findings, worst first. Every rank's numbers and every copy of every box take part."""
    squares: dict[tuple[str, str], dict[Box, float]] = {}
    findings: dict[tuple[str, str], float] = {}
    for rank in ranks:
        for what, name, error in _number_errors(reference, rank):
            findings[what, name] = _worse(error, findings.get((what, name), 0.0))
        for what, whole, part in _tensors(reference, rank):
            for name, (box, local) in part.items():
                boxes = squares.setdefault((what, name), {})
                error = float((local - _take(whole[name][1], box, local.shape)).square().sum())
                boxes[box] = _worse(error, boxes.get(box, 0.0))
    for what, whole, _ in _tensors(reference, reference):
        floor = FLOOR * math.sqrt(sum(float(t.square().sum()) for _, t in whole.values()))
        for name, (_, tensor) in whole.items():
            boxes = squares.get((what, name), {})
            covered = sum(math.prod(size for _, size in box) for box in boxes)
            if covered != tensor.numel():
                raise AssertionError(f"{what} of {name}: boxes hold {covered} of {tensor.numel()} elements")
            findings[what, name] = _relative(math.sqrt(sum(boxes.values())), max(float(tensor.norm()), floor))
    found = [Finding(what, name, error) for (what, name), error in findings.items()]
    return sorted(found, key=lambda f: -math.inf if math.isnan(f.error) else -f.error)


def worst_by_kind(findings: Sequence[Finding]) -> list[Finding]:
    """The worst of each kind of quantity, in the order of a step."""
    order = ("loss", "auxiliary loss", "gradient norm", "gradient", "weight")
    return [next(f for f in findings if f.what == what) for what in order]


def _number_errors(reference: Snapshot, rank: Snapshot) -> Iterator[tuple[str, str, float]]:
    for step, (want, got) in enumerate(zip(reference.losses, rank.losses, strict=True)):
        depths = [("loss", f", depth {k}") for k in range(1, len(want) - 2)]
        kinds = [("loss", ""), ("auxiliary loss", ""), ("gradient norm", ""), *depths]
        for (what, where), a, b in zip(kinds, want, got, strict=True):
            yield what, f"step {step}{where}", abs(a - b) / max(abs(a), FLOOR)


def _tensors(reference: Snapshot, rank: Snapshot) -> Iterator[tuple[str, Boxes, Boxes]]:
    yield "weight", reference.weights, rank.weights
    merged: tuple[Boxes, Boxes] = ({}, {})
    for out, side in zip(merged, (reference, rank), strict=True):
        for step, gradients in enumerate(side.gradients):
            out.update({f"{name} (step {step})": held for name, held in gradients.items()})
    yield "gradient", *merged


def _take(whole: Tensor, box: Box, shape: torch.Size) -> Tensor:
    """The box of a whole tensor, padded with zeros to a local shape."""
    local = whole.new_zeros(shape)
    local[tuple(slice(size) for _, size in box)] = whole[tuple(slice(o, o + size) for o, size in box)]
    return local


def _relative(error: float, size: float) -> float:
    """Of what is zero everywhere, zeros are equal and nothing else is near."""
    return error / size if size else 0.0 if error == 0 else math.inf


def _worse(a: float, b: float) -> float:
    """The larger error; NaN is worse than any."""
    return a if math.isnan(a) or a > b else b
