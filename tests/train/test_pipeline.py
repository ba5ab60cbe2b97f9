"""The executor on several ranks: what it computes, holds and sends, beside what the schedule promises."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from research import comm
from research.launch.local import start
from research.launch.process import fake_process_group
from research.mesh import Mesh, total_ranks
from research.models import products
from research.parallel.pp import PipelineParallel, cost
from research.parallel.pp.generate import generate
from research.parallel.pp.program import evaluation, program_of
from research.parallel.pp.simulate import simulate
from research.train import executor
from research.train.action import Action, made
from research.train.handover import Handover
from research.train.loop import Trainer
from research.train.run import run
from tests.train.first_step import LIMIT_S, on_ranks


def test_groups_of_a_large_layout_are_as_many_as_the_readme_says(layout, monkeypatch):
    words = ["pp.degree=8", "dp.degree=8", "tp.degree=8", "ep.degree=8", "pp.schedule=interleaved", "dp.zero=1"]
    config, made = layout(*words, "model.layers=32", "model.kv_heads=8", "train.global_batch=16"), []

    def new_group(ranks, timeout):
        made.append(ranks)
        return torch.distributed.group.WORLD

    monkeypatch.setattr(torch.distributed, "new_group", new_group)
    with fake_process_group(total_ranks(config), 0):
        Trainer(config, Mesh.from_config(config, total_ranks(config), 0), torch.device("cpu"))
    mine = sum(0 in ranks for ranks in made)
    told = f"{len(made):,} at pp8 dp8 tp8 ep8 with `interleaved` and ZeRO, of which a rank is in {mine}."
    readme = Path("research/parallel/pp/README.md").read_text(encoding="utf-8")
    assert told in " ".join(readme.split())


def test_a_program_takes_one_simulation_and_serves_every_evaluation(layout, monkeypatch):
    simulated = []
    counted = "research.parallel.pp.program.simulate"
    monkeypatch.setattr(counted, lambda *given: simulated.append(given) or simulate(*given))
    config, pipeline = layout("pp.degree=2", "pp.schedule=zbv", "train.microbatches=11"), PipelineParallel()
    found = [pipeline.evaluation(config, rank, batches) for rank, batches in [(0, 5), (1, 5), (0, 5), (0, 6), (1, 5)]]
    assert len(simulated) == 3 and found[0] is found[2] and found[1] is found[4]
    assert len(found[0].entries) == 10 and len(found[3].entries) == 12


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_evaluation_is_dealt_out_over_both_copies_of_a_stage(ranks):
    """However many more batches it has than a step has microbatches: 4 of 8 go either way."""
    schedule = evaluation(generate("dualpipe", ranks, 8), 24)
    for rank, stages in enumerate(schedule.holds):
        met = Counter(action.stage for action in schedule.flat(rank))
        assert met == dict.fromkeys(stages, 12)


@pytest.mark.parametrize(
    ("name", "ranks", "mib", "per_rank"),
    [("1f1b", 2, 16, None), ("interleaved", 2, 16, 3), ("dualpipe", 2, 16, None), ("zbv", 4, 4, None)],
)
@pytest.mark.parametrize("forward", [False, True])
def test_large_messages_cross_without_a_deadlock(layout, name, ranks, mib, per_rank, forward):
    """In every order that a schedule has, each with the content that its name says."""
    schedule = generate(name, ranks, 5, per_rank)
    schedule = evaluation(schedule, 9) if forward else schedule

    def tensor(name):
        return torch.full((mib * 2**18,), float(hash(name) % 1000))

    def rank(place, device):
        program = program_of(schedule, place.rank)
        mesh = Mesh({"pp": place.world}, place.rank)
        for way in program.ways:
            mesh.way(*way)
        handover = Handover(program, mesh, lambda m: torch.empty(mib * 2**18))
        for action in handover.actions():
            kind, stage, m = made(action)
            step = {"F": -1, "B": 1, "W": 0}[kind]
            if step and 0 <= stage + step < schedule.stages:
                need = Action(kind, stage + step, m)
                assert torch.equal(handover.take(need), tensor(need))
            if step and 0 <= stage - step < schedule.stages:
                handover.give(made(action), tensor(made(action)))
        return sum(mesh.ledger.bytes.values())

    received = start(rank, ranks, layout().launch, LIMIT_S)
    assert all(n % (mib * 2**20) == 0 for n in received) and sum(received) > 0


def asked_for(monkeypatch, layout, name):
    """On all ranks, of the products that are computed while a sender still has messages for the rank: how many there
    are, and during how many the next message was not yet asked for."""
    asked, used, found = Counter(), Counter(), Counter()
    start_receive, wait, linear = comm.start_receive, comm.Receiving.wait, products.linear

    def start_counted(out, way, purpose):
        asked[way.ranks[0]] += 1
        return start_receive(out, way, purpose)

    def wait_counted(self):
        used[self._group.ranks[0]] += 1
        return wait(self)

    def body(trainer, batches):
        due = {sender: len(names) for sender, names in trainer.program.receives.items()}

        def watched(x, w):
            left = [sender for sender, n in due.items() if used[sender] < n]
            found["products"] += len(left)
            found["late"] += sum(asked[sender] <= used[sender] for sender in left)
            return linear(x, w)

        monkeypatch.setattr(products, "linear", watched)
        trainer.backward(batches)
        assert used == due
        return found

    monkeypatch.setattr(comm, "start_receive", start_counted)
    monkeypatch.setattr(comm.Receiving, "wait", wait_counted)
    words = ["pp.degree=2", f"pp.schedule={name}", "train.microbatches=4", "model.experts=0"]
    return sum(on_ranks(layout(*words), body), Counter())


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe"])
def test_messages_are_asked_for_before_they_are_needed(layout, monkeypatch, name):
    """So that they travel beside what is computed."""
    found = asked_for(monkeypatch, layout, name)
    assert found["products"] > 100 and found["late"] == 0


def test_planted_messages_asked_for_when_they_are_needed(layout, monkeypatch):
    def late(self, name):
        if name not in self._sender:
            return self._here.pop(name)
        sender = self._sender[name]
        while name not in self._coming[sender]:
            self._ask(sender)
        return self._coming[sender].pop(name).wait()

    monkeypatch.setattr(Handover, "take", late)
    assert asked_for(monkeypatch, layout, "1f1b")["late"] > 0


@pytest.mark.parametrize(
    "words",
    [
        "pp.degree=2 train.microbatches=3",
        "pp.degree=2 pp.schedule=zbv train.dtype=bfloat16",
        "pp.degree=2 pp.schedule=dualpipe train.microbatches=4 train.dtype=float32",
        "pp.degree=2 pp.schedule=zb_h1 tp.degree=2 train.global_batch=14 train.microbatches=4",
        "pp.degree=2 pp.schedule=1f1b tp.degree=2 tp.sequence=false",
        "pp.degree=2 dp.degree=2 pp.schedule=interleaved",
    ],
)
def test_a_step_receives_what_the_formula_says(layout, words):
    def body(trainer, batches):
        trainer.backward(batches)
        counted = trainer.mesh.ledger.bytes.items()
        return {"/".join(label[1:]): n for label, n in counted if label.op == "receive"}

    config = layout(*words.split())
    most = {}
    for received in on_ranks(config, body):
        most = {k: max(received.get(k, 0), most.get(k, 0)) for k in received | most}
    assert most == cost.traffic(config)


UNEVEN = ["train.microbatches=7", "train.global_batch=11", "model.layers=6", "model.mtp_depth=2"]


def losses_alone(trainer, batches):
    """(M, 2 + depths): each microbatch through the whole model by itself, its terms as parts of the step's."""
    with torch.no_grad():
        terms = torch.stack([torch.stack(trainer.built.model(b).terms) for b in batches])
    counted = [sum(int((t >= 0).sum()) for t in targets) for targets in zip(*map(targets_of, batches), strict=True)]
    tokens = torch.tensor([b.tokens.numel() for b in batches], dtype=terms.dtype)
    terms[:, 1] *= tokens / tokens.sum()
    terms[:, [0, 2, 3]] /= torch.tensor(counted)
    return terms


def targets_of(batch):
    return [batch.targets, *(a.targets for a in batch.ahead)]


def off(layout, words):
    """The largest relative error of a loss of a microbatch, on any rank."""
    (wanted,) = on_ranks(layout(*UNEVEN), losses_alone)
    assert wanted.shape == (7, 4) and all(len(set(column.tolist())) == 7 for column in wanted.T)
    found = on_ranks(layout(*UNEVEN, *words.split()), lambda t, b: t.backward(b).by_microbatch)
    return max(((rank - wanted) / wanted).abs().max().item() for rank in found)


@pytest.mark.parametrize(
    "words",
    ["", "pp.degree=2", "pp.degree=2 pp.schedule=dualpipe", "pp.degree=4 pp.schedule=interleaved_zb"],
)
def test_losses_of_microbatches_come_in_order_whatever_the_schedule(layout, words):
    assert off(layout, words) < 1e-13


def test_planted_losses_in_another_order(layout, monkeypatch):
    real = executor._Walk._forward

    def backwards(self, action):
        self.losses = self.losses.flip(0)
        real(self, action)
        self.losses = self.losses.flip(0)

    monkeypatch.setattr(executor._Walk, "_forward", backwards)
    assert off(layout, "") > 1e-3


def test_a_run_over_stages_has_the_row_of_one_process(layout):
    """Losses, evaluations, loads of all experts, parameters; and what pairs did."""
    words = ["train.steps=3", "train.warmup_steps=1", "train.eval_every=2", "data.heldout=0.1"]
    words += ["model.bias_rate=0.01", "data.path=experiments/configs"]

    def row_of(*more):
        config = layout(*words, *more)
        return start(lambda p, d: run(config, p, d), total_ranks(config), config.launch, LIMIT_S)[0]

    one = row_of()
    for more in (["pp.schedule=zbv", "dp.degree=2"], ["pp.schedule=dualpipe", "train.microbatches=4"]):
        two = row_of("pp.degree=2", *more)
        one = row_of(*more[1:]) if "train.microbatches=4" in more else one
        assert two.losses == pytest.approx(one.losses, rel=1e-12)
        assert two.grad_norms == pytest.approx(one.grad_norms, rel=1e-9)
        assert [loss for _, loss in two.evals] == pytest.approx([loss for _, loss in one.evals], rel=1e-12)
        assert two.expert_choices == one.expert_choices and two.parameters == one.parameters
        assert two.overlapped_pairs == ("one after the other" if "dualpipe" in more[0] else "")
        assert two.comm_bytes["pp"]["activations/receive/F"] > 0
