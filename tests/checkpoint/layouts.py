"""Made-up layouts: every rank's boxes of one model under any degrees of tp, ep, etp, pp, dp and ZeRO."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from research.build import normal
from research.config import ModelConfig
from research.mesh import Box, Layout, Mesh
from research.models.decoder import Decoder, specs
from research.parallel.dp.shards import Cut
from research.train.checkpoint.pieces import Piece
from research.train.checkpoint.state import writes_copy

SPLITS = {"vocab": "tp", "heads": "tp", "kv_heads": "tp", "ffn": "tp", "expert": "ep", "expert_ffn": "etp"}
MODEL = ModelConfig(vocab=250, dim=24, layers=4, heads=4, kv_heads=2, ffn=50, experts=6, expert_ffn=12, bias_rate=0.1)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Made:
    """Degrees of a made-up layout. `zero` cuts each box over its copies."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    zero: bool = False

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp

    def mesh(self, rank: int) -> Mesh:
        return Mesh({"dp": self.dp, "tp": self.tp, "pp": self.pp, "ep": self.ep, "etp": self.etp}, rank, fake=True)


def declared():
    with torch.device("meta"):
        return specs(Decoder(MODEL))


def stages_of(name: str, pp: int) -> set[int]:
    """Layers are dealt out evenly; the embedding is on the first and on the last stage, as a tied one would be."""
    if name.startswith("layers."):
        return {int(name.split(".")[1]) * pp // MODEL.layers}
    return {0, pp - 1} if name.startswith("embedding") else {pp - 1}


def boxes(made: Made) -> Iterator[tuple[int, str, Box, bool]]:
    """Rank, name, box, and whether the rank is the one of all copies that writes."""
    meshes = [made.mesh(rank) for rank in range(made.world)]
    for name, spec in declared().items():
        cut = tuple((SPLITS[d], meshes[0].sizes[SPLITS[d]]) if d in SPLITS else None for d in spec.dims)
        layout = Layout(spec.dims, spec.units, spec.unit, cut)
        holders: dict[Box, list[int]] = {}
        for mesh in meshes:
            if mesh.at["pp"] in stages_of(name, made.pp):
                holders.setdefault(layout.box(mesh.at), []).append(mesh.rank)
        for box, ranks in holders.items():
            yield from shards(name, box, layout.local_shape(), ranks) if made.zero else copies(name, box, ranks)


def copies(name: str, box: Box, ranks: list[int]) -> Iterator[tuple[int, str, Box, bool]]:
    writer = next(i for i in range(len(ranks)) if writes_copy(name, FakeGroup(len(ranks), i)))
    return ((rank, name, box, i == writer) for i, rank in enumerate(ranks))


def shards(name: str, box: Box, shape: tuple[int, ...], ranks: list[int]) -> Iterator[tuple[int, str, Box, bool]]:
    """Some of the last ones may be empty."""
    cut = Cut(shape, len(ranks))
    return ((rank, name, cut.box(box, i), True) for i, rank in enumerate(ranks))


@dataclass
class FakeGroup:
    size: int
    rank: int


def truth(name: str, shape: tuple[int, ...], box: Box) -> torch.Tensor:
    """The values of a box of a global tensor."""
    return normal(7, name, shape, box, CPU).to(torch.bfloat16 if "norm" in name else torch.float32)


KINDS = ("weight", "exp_avg", "exp_avg_sq")


def pieces(made: Made, rank: int, fill: float | None = None) -> list[Piece]:
    """All pieces of a rank with their true values, or all filled with one."""
    found, all_specs = [], declared()
    for (holder, name, box, writes), kind in itertools.product(boxes(made), KINDS):
        if holder == rank:
            full, shape = f"{kind}/{name}", all_specs[name].shape
            tensor = truth(full, shape, box)
            found.append(Piece(full, shape, box, tensor if fill is None else torch.full_like(tensor, fill), writes))
    step = torch.tensor(3.0 if fill is None else fill)
    return [*found, Piece("optimizer/step", (), (), step, rank == 0)]


def wrong(found: list[Piece]) -> list[str]:
    """Names of the pieces that do not hold the truth, bit by bit."""
    return [
        p.name
        for p in found
        if not torch.equal(p.tensor, torch.tensor(3.0) if p.name == "optimizer/step" else truth(p.name, p.shape, p.box))
    ]
