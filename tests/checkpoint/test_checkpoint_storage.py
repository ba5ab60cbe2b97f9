"""The pieces of a real storage under a made-up axis: padded vocabularies, copied kv heads, split experts."""

import pytest
import torch

from research import build as build_module
from research.build import build
from research.config import LaunchConfig, RunConfig, replace
from research.launch.local import start
from research.mesh import Mesh
from research.parallel.dp import DataParallel
from research.train.checkpoint.pieces import Piece
from research.train.checkpoint.state import pieces_of
from research.train.checkpoint.transfer import Ranks
from research.train.storage import Storage
from tests.checkpoint.layouts import SPLITS, truth

CONFIG = replace(
    RunConfig(),
    {"model.vocab": 250, "model.layers": 2, "model.bias_rate": 0.1, "train.dtype": "bfloat16"},
)
UNTOUCHED = 1234.5
LAUNCH = LaunchConfig(device="cpu", threads=1)


class Splitting(DataParallel):
    """Splits dims as tensor and expert parallelism do; it has no seams, so nothing can be computed."""

    name, splits = "splitting", SPLITS


@pytest.fixture
def storage_of(monkeypatch):
    monkeypatch.setattr(build_module, "AXES", (DataParallel(), Splitting()))

    def made(sizes, place, device):
        return Storage(build(CONFIG, Mesh(sizes, place.rank), device), CONFIG.train, device)

    return made


def values_of(piece):
    if piece.name == "optimizer/step":
        return torch.tensor(5.0)
    return truth(piece.name, piece.shape, piece.box).to(piece.tensor.dtype)


def whole_locals(storage):
    """Masters and moments with their padding."""
    for _, _, master in storage.weights():
        yield master
        yield from (t for t in storage.optimizer.state.get(master, {}).values() if t.ndim)


MOVES = [({"tp": 3}, {"tp": 4, "ep": 2}), ({"tp": 4, "ep": 4}, {"dp": 2}), ({}, {"tp": 3})]


@pytest.mark.parametrize("before, after", MOVES)
def test_padding_and_copies(tmp_path, storage_of, before, after):
    def save(place, device):
        storage = storage_of(before, place, device)
        pieces = list(pieces_of(storage))
        for local in whole_locals(storage):
            local.fill_(torch.nan)  # padding that came into a checkpoint would show
        for piece in pieces:
            piece.tensor.copy_(values_of(piece))
        Ranks(place.world, place.rank).save(tmp_path / "step", lambda: 1, {}, [p for p in pieces if p.writes])

    def load(place, device):
        storage = storage_of(after, place, device)
        pieces = list(pieces_of(storage))
        for local in whole_locals(storage):
            local.fill_(UNTOUCHED)
        Ranks(place.world, place.rank).load(tmp_path / "step", pieces, lambda name: True)
        storage.publish()
        assert [p.name for p in pieces if not torch.equal(p.tensor, values_of(p))] == []
        for held in storage.held.values():
            assert torch.equal(held.parameter.detach(), held.master.to(held.parameter.dtype))
            inside = sum(p.tensor.numel() for p in pieces if p.name == f"weight/{held.name}")
            assert (held.master == UNTOUCHED).sum() == held.master.numel() - inside  # padding is left alone
        return sorted(p.name for p in pieces)

    start(save, Mesh(before, fake=True).world, LAUNCH, 60.0)
    names = start(load, Mesh(after, fake=True).world, LAUNCH, 60.0)[0]
    trained = [n for n in names if n.startswith("exp_avg/")]
    assert len(trained) == names.count("optimizer/step") == sum(n.startswith("exp_avg_sq/") for n in names)
    assert [n for n in names if n.endswith("ffn.bias")] == ["weight/layers.1.ffn.bias"]  # of the router: no moments


def test_planted_padding_is_refused():
    padded = torch.zeros(84, 8)
    with pytest.raises(ValueError, match=r"^embedding: a local tensor of shape \(84, 8\), .*\[168:250, 0:8\].*padding"):
        Piece("embedding", (250, 8), ((168, 82), (0, 8)), padded)
