"""What expert parallelism receives, label by label, against the closed formulas of its README, for measured loads."""

from fractions import Fraction

import pytest
import torch

from research.data.tokens import open_tokens
from research.launch.local import start
from research.mesh import Mesh, total_ranks
from research.parallel import ep
from research.parallel.ep import dispatch
from research.parallel.ep.cost import Load, traffic
from research.settings import load
from research.train.loop import Trainer
from research.train.run import global_batches


def measured(config, place, device, monkeypatch):
    """Bytes of the ep axis in one step, by label; what the tokens that this rank sends chose, of each layer and piece
    (MoE layers, C, E); its group."""
    calls = []

    def noted(planner):
        def plan(ids, n_experts):
            calls.append(torch.stack([torch.bincount(i.flatten(), minlength=n_experts + 1)[:n_experts] for i in ids]))
            return planner(ids, n_experts)

        return plan

    for name, real in dispatch.DISPATCH.items():
        monkeypatch.setitem(dispatch.DISPATCH, name, lambda *args, real=real: noted(real(*args)))
    trainer = Trainer(config, Mesh.from_config(config, place.world, place.rank), device)
    trainer.backward(global_batches(config, open_tokens(config.data)).microbatches_of(0))
    of_microbatch = len(calls) // config.train.microbatches  # once a layer, whatever recompute repeats
    chosen = torch.stack(calls).unflatten(0, (-1, of_microbatch)).sum(0)
    counted = trainer.mesh.ledger.bytes.items()
    got = {"/".join(label[1:]): n for label, n in counted if label.axis == "ep" and label.purpose != "gradients"}
    return got, chosen, trainer.mesh.group("experts").ranks


@pytest.fixture
def ranks_of(text, tmp_path, monkeypatch):
    def run(words):
        given = [f"data.path={text}", f"data.cache={tmp_path}", *words.split()]
        config = load("experiments/configs/tiny.yaml", given)
        return config, start(lambda p, d: measured(config, p, d, monkeypatch), total_ranks(config), config.launch, 60.0)

    return run


def loads_of(config, rank, of_ranks):
    """What crosses between ranks, as seen from one of them."""
    group = of_ranks[rank][2]
    held = config.model.experts // config.ep.degree
    block = {r: slice(i // config.ep.tensor * held, (i // config.ep.tensor + 1) * held) for i, r in enumerate(group)}
    others = [r for r in group if r != rank]
    for layer in range(len(of_ranks[rank][1])):
        arrive = sum(of_ranks[r][1][layer, :, block[rank]].sum() for r in others)
        leave = sum(of_ranks[rank][1][layer, :, block[r]].sum(-1) for r in others)
        yield Load(Fraction(int(arrive)), [Fraction(int(n)) for n in leave])


@pytest.mark.parametrize(
    "words",
    [
        "dp.degree=2 ep.degree=2",
        "dp.degree=2 tp.degree=2 ep.degree=2 ep.tensor=2 ep.overlap=3 train.dtype=float32",
        "dp.degree=4 ep.degree=2 train.recompute=full train.dtype=bfloat16",
        "tp.degree=4 tp.sequence=false ep.degree=4 ep.overlap=3 train.recompute=full model.mtp_depth=1",
        "dp.degree=2 ep.degree=2 train.recompute=full model.norm=post model.moe_every=2",
        "dp.degree=2 ep.degree=2 model.capacity=0.6",
        "dp.degree=3 ep.degree=3 model.experts=9 ep.dispatch=all_gather train.recompute=full ep.overlap=3",
        "dp.degree=2 tp.degree=2 ep.degree=2 ep.tensor=2 ep.dispatch=all_gather model.mtp_depth=1 model.norm=post",
    ],
)
def test_bytes_of_a_step(ranks_of, words):
    config, ranks = ranks_of(words)
    if not config.model.capacity:  # however tensor parallelism holds tokens, each choice is sent by one rank
        layers, tokens = len(ranks[0][1]), config.train.global_batch * config.data.sequence
        assert sum(int(chosen.sum()) for _, chosen, _ in ranks) == layers * tokens * config.model.top_k
    for rank, (got, _, _) in enumerate(ranks):
        assert got == traffic(config, list(loads_of(config, rank, ranks)))
        if config.ep.dispatch == "all_gather":
            assert got == traffic(config)


def test_even_load(ranks_of):
    """Without a load: that of a router that treats all experts alike, which the first steps are close to."""
    config, ranks = ranks_of("dp.degree=2 ep.degree=2 ep.overlap=2")
    even, got = traffic(config), ranks[0][0]
    assert even.keys() == got.keys()
    assert all(abs(even[label] / n - 1) < 0.2 for label, n in got.items())
    tokens = config.train.global_batch * config.data.sequence // 2
    assert even["combine/all_to_all/F"] == 3 * tokens * config.model.top_k * config.model.dim * 8 // 2


def test_planted_loads_told_again_by_recompute(ranks_of, monkeypatch):
    """Gradients stay right where a layer that is run again makes its plan again: the ledger alone tells."""
    real = dispatch.experts

    def forgetful(planner, pieces):
        inner = real(planner, pieces)
        return lambda *args, keep, **more: inner(*args, **more)

    monkeypatch.setattr(ep, "experts", forgetful)
    config, ranks = ranks_of("dp.degree=2 ep.degree=2 train.recompute=full")
    assert ranks[0][0].keys() > traffic(config).keys()


def test_one_rank_receives_nothing():
    assert traffic(load("experiments/configs/tiny.yaml")) == {}
