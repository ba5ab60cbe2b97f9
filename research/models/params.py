"""Parameters are declared: each names the meaning and the size of its dims, and how it starts."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from research.models.seams import Seams


@dataclass(frozen=True)
class Spec:
    """Declaration of one parameter. Dim i is named dims[i] and has units[i] * unit[i] elements; a unit is never cut."""

    dims: tuple[str, ...]
    units: tuple[int, ...]
    unit: tuple[int, ...]
    std: float | None  # of normal initial values; None starts as ones
    keep_float32: bool  # stays float32 in a bfloat16 run
    trained: bool  # by gradients; what else changes it says so itself

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(n * u for n, u in zip(self.units, self.unit, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def decays(self) -> bool:
        """Weight decay is for matrices; norms and other vectors keep their scale."""
        return len(self.dims) > 1


class Block(nn.Module):
    """A module with declared parameters. `seams` is attached when the model is built."""

    seams: Seams

    def __init__(self) -> None:
        super().__init__()
        self.specs: dict[str, Spec] = {}

    def param(
        self,
        name: str,
        *,
        std: float | None = None,
        keep_float32: bool = False,
        trained: bool = True,
        **dims: int | tuple[int, int],
    ) -> None:
        """Declare `self.<name>` by its logical dims: `dim=D` has D units of one element, `heads=(H, h)` H of h."""
        sizes = [d if isinstance(d, tuple) else (d, 1) for d in dims.values()]
        units, unit = zip(*sizes, strict=True)
        self.specs[name] = Spec(tuple(dims), units, unit, std, keep_float32, trained)
        setattr(self, name, nn.Parameter(torch.empty(self.specs[name].shape), requires_grad=trained))
