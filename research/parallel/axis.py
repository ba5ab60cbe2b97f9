"""What an axis is, and the list of those that exist. Each axis is one folder beside this file."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from research.built import Built
from research.config import RunConfig, degrees
from research.mesh import Layout, Mesh
from research.models.batch import Batch
from research.models.params import Spec
from research.models.products import Products
from research.models.seams import Seam
from research.parallel.cp import ContextParallel
from research.parallel.dp import DataParallel
from research.parallel.ep import ExpertParallel
from research.parallel.pp import PipelineParallel
from research.parallel.tp import TensorParallel
from research.problems import Problem
from research.train.action import Program, forward_only, one_stage
from research.train.storage import Storage


class Axis(Protocol):
    """One parallel axis. A model never sees it: it splits logical dims, supplies seams and cuts the batch."""

    name: str
    splits: Mapping[str, str]  # logical dim -> mesh axis

    def problems(self, config: RunConfig) -> Iterator[Problem]:
        """What this axis cannot do, before any process starts."""
        ...

    def seams(self, config: RunConfig, mesh: Mesh, products: Products) -> Mapping[str, Seam]:
        """The seams that this axis owns; none where it is off. A product with a weight goes through `products`."""
        ...

    def wraps(self, config: RunConfig, mesh: Mesh) -> Mapping[str, Callable[[Seam], Seam]]:
        """What this axis does around a seam, whoever owns it."""
        ...

    def cut_batch(self, batch: Batch, config: RunConfig, mesh: Mesh) -> Batch:
        """This rank's part of a batch that is whole along this axis."""
        ...


@runtime_checkable
class Stores(Protocol):
    """An axis that keeps training state in its own way."""

    def storage(self, config: RunConfig, built: Built, device: torch.device) -> Storage: ...

    def makes_parameters(self, config: RunConfig) -> bool:
        """Whether the storage does it, as no rank has room for all of them at once."""
        ...


@runtime_checkable
class Staged(Protocol):
    """An axis that cuts the model into stages."""

    def stages(self, config: RunConfig) -> Sequence[Mapping[int, Collection[str] | None]]:
        """By pp coordinate: the stages there, and the parts of the model in each, as prefixes of parameter names; None:
        all of it."""
        ...

    def program(self, config: RunConfig, rank: int) -> Program:
        """What the ranks of a pp coordinate run in a step."""
        ...

    def evaluation(self, config: RunConfig, rank: int, batches: int) -> Program:
        """What they run to evaluate so many batches."""
        ...


class OneStage:
    """No axis cuts the model."""

    def stages(self, config: RunConfig) -> Sequence[Mapping[int, Collection[str] | None]]:
        return [{0: None}]

    def program(self, config: RunConfig, rank: int) -> Program:
        return one_stage(config.train.microbatches)

    def evaluation(self, config: RunConfig, rank: int, batches: int) -> Program:
        return forward_only(batches)


AXES: tuple[Axis, ...] = (DataParallel(), ContextParallel(), TensorParallel(), ExpertParallel(), PipelineParallel())


def layout_of(spec: Spec, mesh: Mesh) -> Layout:
    """Which mesh axes cut this parameter: the axes say which logical dims they split."""
    splits = {dim: axis for a in AXES for dim, axis in a.splits.items()}
    cut = [(splits[d], mesh.sizes[splits[d]]) if d in splits else None for d in spec.dims]
    return Layout(spec.dims, spec.units, spec.unit, tuple(cut))


def staged(config: RunConfig) -> Staged:
    """What cuts the model of this config into stages."""
    sizes = degrees(config)
    return next((axis for axis in AXES if isinstance(axis, Staged) and sizes[axis.name] > 1), OneStage())


def problems(config: RunConfig) -> Iterator[Problem]:
    """Problems of every axis, in the order of the registry."""
    for axis in AXES:
        yield from axis.problems(config)


def cut_batch(batch: Batch, config: RunConfig, mesh: Mesh) -> Batch:
    """This rank's part of a global microbatch."""
    batch = batch.numbered()
    for axis in AXES:
        batch = axis.cut_batch(batch, config, mesh)
    return batch


def storage(config: RunConfig, built: Built, device: torch.device) -> Storage:
    """The training state of this rank, kept by the axis that cares for it; otherwise whole."""
    for axis in AXES:
        if isinstance(axis, Stores):
            return axis.storage(config, built, device)
    return Storage(built, config.train, device)


def makes_parameters(config: RunConfig) -> bool:
    """Whether the storage of this config makes the parameters, so that `build` must not."""
    return any(axis.makes_parameters(config) for axis in AXES if isinstance(axis, Stores))
