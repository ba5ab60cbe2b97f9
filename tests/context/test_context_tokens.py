"""Who holds which token: everything that a token carries stays with it, by identities, at every balance."""

import itertools
from dataclasses import fields, replace

import pytest
import torch

from research.config import CpConfig, DpConfig, ModelConfig, RunConfig, TpConfig
from research.mesh import Mesh, total_ranks
from research.models.batch import Ahead, Batch
from research.models.rope import places
from research.parallel import cp as context
from research.parallel.axis import cut_batch

SAMPLES, SEQUENCE = 6, 48
LAYOUTS = [
    RunConfig(cp=CpConfig(n, method, balance, ulysses), dp=DpConfig(dp), tp=TpConfig(tp))
    for (n, method, ulysses), balance, dp, tp in itertools.product(
        [(2, "ring", 1), (4, "all_gather", 1), (3, "ulysses", 1), (8, "hybrid", 2)],
        ["none", "zigzag", "striped"],
        [1, 2],
        [1, 2],
    )
]


def whole_batch():
    """Tokens that are their own numbers, so that every other tensor says whose it is."""
    ids = torch.arange(SAMPLES * SEQUENCE).view(SAMPLES, SEQUENCE)
    documents = (torch.arange(SEQUENCE) * 7 // SEQUENCE).expand(SAMPLES, -1)
    ahead = tuple(Ahead(ids + k, ids + k + 1000) for k in (1, 2))
    return Batch(ids, ids + 5000, torch.arange(SEQUENCE).expand(SAMPLES, -1), documents, ahead=ahead)


def cut(config):
    """The part of each rank, and its mesh; no process is started."""
    meshes = [
        Mesh({"cp": config.cp.degree, "dp": config.dp.degree, "tp": config.tp.degree}, r)
        for r in range(total_ranks(config))
    ]
    return [(mesh, cut_batch(whole_batch(), config, mesh)) for mesh in meshes]


def check(config):
    whole, parts = whole_batch(), cut(config)
    begins = context.starts(whole.documents)
    for _, part in parts:
        ids = part.tokens
        assert torch.equal(part.targets, ids + 5000) and torch.equal(part.numbers, ids)
        assert torch.equal(part.positions, ids % SEQUENCE)
        assert torch.equal(part.documents, whole.documents.flatten()[ids])
        for k, ahead in enumerate(part.ahead, 1):
            assert torch.equal(ahead.tokens, ids + k) and torch.equal(ahead.targets, ids + k + 1000)
        assert (part.positions.diff(dim=1) > 0).all() and (part.positions == part.positions[:1]).all()
        rows = ids[:, 0] // SEQUENCE
        assert (
            torch.equal(part.starts, begins[rows])
            and part.whole_tokens == ids.numel() * config.cp.degree * config.dp.degree
        )
    held = torch.cat([part.tokens.flatten() for mesh, part in parts if mesh.at["tp"] == 0])
    assert torch.equal(held.sort().values, whole.tokens.flatten())  # each token on one rank, and its copies for tp
    by_place = {(mesh.at["dp"], mesh.at["cp"]): part.tokens for mesh, part in parts}
    assert all(torch.equal(part.tokens, by_place[mesh.at["dp"], mesh.at["cp"]]) for mesh, part in parts)


@pytest.mark.parametrize(
    "config", LAYOUTS, ids=lambda c: f"{c.cp.method}-{c.cp.balance}-dp{c.dp.degree}-tp{c.tp.degree}"
)
def test_each_token_keeps_what_is_its_own(config):
    check(config)


def test_every_tensor_of_a_batch_is_looked_at():
    """A new field of a batch has to be cut, and to be checked above."""
    known = {"tokens", "targets", "positions", "documents", "numbers", "whole_tokens", "starts", "ahead"}
    assert {f.name for f in fields(Batch)} == known and {f.name for f in fields(Ahead)} == {"tokens", "targets"}


@pytest.mark.parametrize("balance", ["none", "zigzag", "striped"])
def test_rotary_turns_by_position(balance):
    """The turns of each rank, put back by position, are those of the whole sample."""
    config = RunConfig(cp=CpConfig(4, balance=balance), dp=DpConfig(1))
    c = ModelConfig(head_dim=8)
    want = places(whole_batch(), c, torch.float64).rotary
    for _, part in cut(config):
        for got, whole in zip(places(part, c, torch.float64).rotary, want, strict=True):
            torch.testing.assert_close(
                got, whole.gather(1, part.positions[..., None, None].expand(got.shape)), atol=1e-12, rtol=0
            )


@pytest.mark.parametrize("field", ["positions", "targets"])
def test_planted_tensor_that_is_cut_otherwise(monkeypatch, field):
    """Positions that begin anew on each rank, targets of a plain cut: both leave the loss of an epoch plausible."""
    real = context.ContextParallel.cut_batch

    def otherwise(self, batch, config, mesh):

        first = getattr(batch, field).chunk(config.cp.degree, 1)[0 if field == "positions" else mesh.at["cp"]]
        return replace(real(self, batch, config, mesh), **{field: first})

    monkeypatch.setattr(context.ContextParallel, "cut_batch", otherwise)
    with pytest.raises(AssertionError):
        check(LAYOUTS[4])
