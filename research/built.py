"""What `build` makes, and what trains it reads: the model of this rank with what is known of each parameter."""

from dataclasses import dataclass, field

import torch

from research.mesh import Group, Layout, Mesh
from research.models.decoder import Decoder
from research.models.params import Spec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Built:
    """The model of this rank. The mappings know every parameter by full name, those that other ranks hold too: making
    groups is collective, so every rank must go through all layouts."""

    model: Decoder
    mesh: Mesh
    specs: dict[str, Spec]
    layouts: dict[str, Layout]
    replicas: dict[str, Group]
    stages: dict[str, int] = field(default_factory=dict)  # of those that are not on stage 0
