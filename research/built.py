"""What `build` makes, and what trains it reads: the model of this rank with what is known of each parameter."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from research.mesh import Group, Layout, Mesh
from research.models.batch import Batch
from research.models.decoder import Decoder, Parts
from research.models.params import Spec
from research.models.seams import Seams

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
SHARED = -1  # no stage


def dtype_name(dtype: torch.dtype) -> str:
    """The `train.dtype` of weights that are stored in a dtype: float32 where none is that one."""
    return next((name for name, own in DTYPES.items() if own == dtype), "float32")


@dataclass(frozen=True)
class Built:
    """The model of this rank: one or several stages. `specs`, `layouts` and `replicas` know every parameter
    by full name, those that other ranks hold too: making groups is collective, so every rank must go through all
    layouts."""

    model: Decoder
    mesh: Mesh
    specs: dict[str, Spec]
    layouts: dict[str, Layout]
    replicas: dict[str, Group]
    seams: Seams
    dtype: torch.dtype  # of activations
    parts: dict[int, Parts]  # by stage that is here
    initial: Callable[[str], Tensor]  # a parameter's first value on this rank, padded to its local shape
    stages: dict[str, int] = field(default_factory=dict)  # of each parameter that is here; SHARED: several of them
    copies: dict[str, Group] = field(default_factory=dict)  # of those that other stages hold too: the ranks across them

    def first_holds(self, name: str) -> bool:
        """Whether this rank is the first of the pp axis that holds this parameter, so that it counts once."""
        group = self.copies.get(name)
        return group is None or group.rank == 0

    def stream_like(self, batch: Batch) -> Tensor:
        """Room for the residual stream of a batch between two layers (B, S, D): both sides of a message know it so."""
        shape = *self.seams.residual(batch.tokens).shape, self.model.c.dim
        return torch.empty(shape, dtype=self.dtype, device=batch.tokens.device)


def hollow(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor with a shape and without memory, for whoever gives it some."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor
