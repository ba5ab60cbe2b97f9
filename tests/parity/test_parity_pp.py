"""Pipeline parallelism against one process, by every gradient in float64; and that planted faults are caught."""

import dataclasses

import pytest
import torch

from research.data.tokens import open_tokens
from research.launch.local import RankError, start
from research.mesh import Mesh, total_ranks
from research.parallel import pp
from research.parallel.pp import PipelineParallel
from research.parallel.pp.generate import FAMILIES
from research.settings import load
from research.train import executor
from research.train.executor import roots_of
from research.train.loop import Trainer
from research.train.run import global_batches
from research.train.storage import Storage
from tests.parity.findings import assert_equal, fails

SLOW = pytest.mark.slow
DEEP = "model.layers=6 train.microbatches=8"


def ranks_of(name):
    """Layers enough for every stage, microbatches enough that the pipeline fills."""
    yield f"pp.degree=2 pp.schedule={name} train.microbatches=4"
    yield pytest.param(f"pp.degree=4 pp.schedule={name} {DEEP}", marks=() if name in HARD else SLOW)
    yield pytest.param(f"pp.degree=8 pp.schedule={name} model.layers=16 train.microbatches=12", marks=SLOW)


HARD = ("interleaved", "zbv", "dualpipe")  # which do all that others do
ALL_AXES = "pp.degree=2 dp.degree=2 cp.degree=2 tp.degree=2 ep.degree=4 train.microbatches=4 model.kv_heads=4"
GRID = [case for name in FAMILIES for case in ranks_of(name)]
GRID += [
    "pp.degree=2 train.microbatches=1",
    "pp.degree=4 pp.schedule=dualpipe_v model.layers=6 train.microbatches=1",
    "pp.degree=4 pp.schedule=dualpipe model.layers=6 train.microbatches=3",
    "pp.degree=3 pp.schedule=interleaved model.layers=5 train.microbatches=7 train.global_batch=15",
    "pp.degree=4 pp.schedule=zb_h1 model.layers=2 train.microbatches=3 train.recompute=full",  # no layer at the ends
    "pp.degree=2 pp.schedule=zbv model.tied=true model.mtp_depth=2 train.microbatches=4",  # both ends on one rank
    "pp.degree=2 pp.schedule=zb_h2 model.tied=true model.mtp_depth=1 dp.degree=2 train.recompute=full",
    "pp.degree=2 pp.schedule=dualpipe model.tied=true train.microbatches=4 model.bias_rate=0.05 train.clip=0.01",
    "pp.degree=2 dp.degree=3 pp.schedule=interleaved train.bucket_mib=0.01 train.deterministic=true",
    "pp.degree=2 tp.degree=2 pp.schedule=zb_h1 tp.keep_gathered=true tp.overlap=3",
    "pp.degree=2 tp.degree=2 pp.schedule=zbv tp.sequence=false train.recompute=full",
    "pp.degree=2 tp.degree=2 pp.schedule=dualpipe_v model.tied=true model.vocab=251",
    "pp.degree=2 dp.degree=2 pp.schedule=1f1b model.capacity=0.7 model.balance_scope=sequence model.drop_by=score",
    "pp.degree=2 pp.schedule=zb_h1 model.document_mask=true model.window=20 data.path=experiments/configs",
    "pp.degree=2 pp.schedule=zbv model.attention=mla model.rotary_dim=4 model.value_dim=12 model.q_latent=24",
    "pp.degree=2 cp.degree=2 pp.schedule=zbv",
    "pp.degree=2 pp.cut=cost model.mtp_depth=1 model.layers=6 model.dense_layers=4",  # 4 layers, 2 and the head
    "pp.degree=3 pp.cut=2,2,0 pp.schedule=zb_h1 train.microbatches=4",
    "pp.degree=2 dp.degree=2 ep.degree=2 pp.schedule=zb_h1 dp.zero=3 train.microbatches=4",
    "pp.degree=2 dp.degree=2 pp.schedule=dualpipe model.tied=true train.microbatches=3",
    "pp.degree=2 dp.degree=2 pp.schedule=dualpipe model.mtp_depth=1 train.microbatches=3 dp.zero=3",
    "pp.degree=2 dp.degree=2 ep.degree=2 pp.schedule=dualpipe dp.zero=2 model.tied=true train.microbatches=4",
    "pp.degree=2 dp.degree=4 dp.replicas=2 dp.zero=2 pp.schedule=zb_h2 train.microbatches=4 train.recompute=full",
    "pp.degree=2 pp.schedule=zb_h1 model.qkv_bias=true model.out_bias=true model.mlp_bias=true model.norm=sandwich",
]
GRID += [
    pytest.param(f"{ALL_AXES} pp.schedule={name} dp.zero={zero}", marks=SLOW)
    for name in ("1f1b", "zbv", "dualpipe_v")
    for zero in (0, 3)
]
OTHERS = ["tp.degree=2", "cp.degree=2", "dp.degree=2 ep.degree=2", *(f"dp.degree=2 dp.zero={z}" for z in (1, 2, 3))]
GRID += [
    pytest.param(f"pp.degree=2 {other} pp.schedule={name} train.microbatches=4", marks=SLOW)
    for other in OTHERS
    for name in FAMILIES
]


@pytest.mark.parametrize("words", GRID)
def test_layout_equals_one_process(prove, words):
    assert_equal(prove(*words.split()))


def planted(monkeypatch, change):
    """The program of rank 1, changed."""
    real = PipelineParallel.program

    def program(self, config, rank):
        found = real(self, config, rank)
        return change(found) if rank == 1 else found

    monkeypatch.setattr(PipelineParallel, "program", program)


def test_planted_messages_in_another_order(prove, monkeypatch):
    """Rank 1 takes the first two activations for each other."""

    def swapped(program):
        first, second, *rest = program.receives[0]
        return dataclasses.replace(program, receives={0: [second, first, *rest]})

    planted(monkeypatch, swapped)
    assert fails(prove("pp.degree=2"), "loss")


@pytest.mark.parametrize(("name", "kinds"), [("1f1b", ["F", "BW"]), ("zb_h1", ["B", "W"])])
def test_planted_actions_in_another_order(prove, monkeypatch, name, kinds):
    """Two that need each other change places: it is noticed at once, not by a hang."""

    def swapped(program):
        first, second = (next(i for i, a in enumerate(program.entries) if a.kind == k) for k in kinds)
        entries = list(program.entries)
        entries[first], entries[second] = entries[second], entries[first]
        return dataclasses.replace(program, entries=entries)

    planted(monkeypatch, swapped)
    with pytest.raises(RankError, match="rank 1 failed first"):
        prove("pp.degree=2", f"pp.schedule={name}")


def test_planted_cut_that_forgets_a_layer(prove, monkeypatch):
    real = pp.cut_of

    def forgetful(config, stages):
        return [[part for part in parts if part != "layers.2"] for parts in real(config, stages)]

    monkeypatch.setattr(pp, "cut_of", forgetful)
    with pytest.raises(AssertionError, match=r"weight of layers\.2\..*: boxes hold 0 of \d+ elements"):
        prove("pp.degree=2", "pp.cut=cost")


def test_planted_weight_gradient_that_is_dropped(prove, monkeypatch):
    real = Storage.accumulate

    def forgetful(self, parameter, grad):
        if parameter is not self.built.model.layers["2"].attention.wo:
            real(self, parameter, grad)

    def last_rank(self, parameter, grad):
        (forgetful if "2" in self.built.model.layers else real)(self, parameter, grad)

    monkeypatch.setattr(Storage, "accumulate", last_rank)
    findings = prove("pp.degree=2", "pp.schedule=zb_h1")
    assert {f.name for f in findings if f.what == "gradient" and not f.passed and "(step 0)" in f.name} == {
        "layers.2.attention.wo (step 0)"
    }


@pytest.mark.parametrize("words", ["model.tied=true", "pp.schedule=dualpipe model.mtp_depth=1"])
def test_planted_copies_whose_gradients_are_not_summed(prove, monkeypatch, words):
    monkeypatch.setattr(Storage, "_sum_copies", lambda self: None)
    assert fails(prove("pp.degree=2", *words.split()), "gradient")


def test_planted_auxiliary_losses_of_the_last_stage_alone(prove, monkeypatch):
    """The loss stays right, the routers of other stages learn nothing."""

    def last_only(output):
        roots = roots_of(output)
        return roots if output.hidden is None else [roots[0], torch.zeros((), requires_grad=True), *roots[2:]]

    monkeypatch.setattr(executor, "roots_of", last_only)
    findings = prove("pp.degree=2")
    assert fails(findings, "gradient")
    assert next(f for f in findings if f.what == "auxiliary loss" and f.name == "step 0").passed


def weights_after_training(config, place, device):
    trainer = Trainer(config, Mesh.from_config(config, place.world, place.rank), device)
    batches = global_batches(config, open_tokens(config.data))
    for step in range(5):
        trainer.update(step, trainer.backward(batches.microbatches_of(step)))
    holders = {name: group.ranks for name, group in trainer.built.copies.items()}
    return {name: (holders.get(name, ()), weight) for name, _, weight in trainer.storage.weights()}


@pytest.mark.parametrize("words", ["model.tied=true", "pp.schedule=dualpipe model.bias_rate=0.01"])
def test_copies_are_bitwise_equal_after_five_steps(text, tmp_path, words):
    given = ["pp.degree=2", "dp.degree=2", "train.dtype=float32", f"data.path={text}", f"data.cache={tmp_path}"]
    config = load("experiments/configs/tiny.yaml", [*given, *words.split()])
    ranks = start(lambda p, d: weights_after_training(config, p, d), total_ranks(config), config.launch, 60.0)
    shared = [(name, w, holders) for mine in ranks for name, (holders, w) in mine.items() if holders]
    assert len(shared) >= 4
    assert all(torch.equal(w, ranks[r][name][1]) for name, w, holders in shared for r in holders)
