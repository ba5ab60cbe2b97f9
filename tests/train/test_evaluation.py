"""Evaluation: the mean over exactly the held-out split, the same in every layout, and without a trace."""

import dataclasses
import json
import math
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from experiments.command import CHECKS
from research import comm, record
from research.config import RunConfig, replace
from research.data.batches import HeldOut
from research.data.packing import Packed, held_out
from research.data.tokens import open_tokens
from research.launch.local import start
from research.launch.process import Place
from research.ledger import EVAL
from research.mesh import Mesh, total_ranks
from research.models.batch import NOT_COUNTED, Batch
from research.settings import load
from research.train.action import forward_only
from research.train.executor import Denominators, execute
from research.train.loop import Trainer, train
from research.train.run import global_batches, run, validation_batches

CPU = torch.device("cpu")
LIMIT_S = 60.0
LAYOUTS: list[dict[str, int | str]] = [{"dp.degree": 2}, {"dp.degree": 3}, {"dp.degree": 2, "train.recompute": "full"}]


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """100 documents of 1 to 60 letters, a fifth of them held out."""
    path = tmp_path_factory.mktemp("text") / "lines.jsonl"
    draw = random.Random(3)
    texts = ["".join(draw.choices("abcdefg \u00e9\n", k=draw.randrange(1, 60))) for _ in range(100)]
    path.write_text("\n".join(json.dumps({"text": t}) for t in texts))
    return path


@pytest.fixture
def config(lines, tmp_path):
    """Microbatches of 4, 4 and 3: batches of an evaluation have 3 rows."""
    words = [f"data.path={lines}", f"data.cache={lines.parent}/cache", f"record.folder={tmp_path}", "data.sequence=16"]
    words += ["data.heldout=0.2", "train.eval_every=2", "train.steps=5", "train.warmup_steps=1", "model.layers=2"]
    words += ["train.global_batch=11", "train.microbatches=3", "model.balance=10"]
    return load("experiments/configs/tiny.yaml", words, CHECKS)


def on_ranks(config: RunConfig, body):
    """body(trainer, corpus) of every rank."""

    def rank(place, device):
        trainer = Trainer(config, Mesh.from_config(config, place.world, place.rank), device)
        return body(trainer, open_tokens(config.data))

    return start(rank, total_ranks(config), config.launch, LIMIT_S)


def trained_and_evaluated(config: RunConfig) -> list[float]:
    """The loss of the held-out text by every rank, after two steps: experts then differ."""

    def body(trainer, corpus):
        batches = global_batches(config, corpus)
        for step in range(2):
            trainer.update(step, trainer.backward(batches.microbatches_of(step)))
        return trainer.evaluate(validation_batches(config, corpus))

    return on_ranks(config, body)


def test_the_tail_is_uneven(config):
    """What the other tests rest on: the last batch has one row for three ranks."""
    split = validation_batches(config, open_tokens(config.data))
    rows = [(split.batch(n).targets >= 0).any(1).tolist() for n in range(len(split))]
    assert rows[-1] == [True, False, False] and len(rows) > 5, rows


def test_a_naive_mean_over_tokens(config):
    """Every target by itself, from lists of ids: one counted token a call."""
    corpus = open_tokens(config.data)
    (tokens,) = corpus.sources
    chosen = held_out(100, 0.2, config.train.seed, 0)
    documents = [tokens.ids[a:b].tolist() for a, b in zip(tokens.offsets, tokens.offsets[1:], strict=False)]
    kept = [d for d, c in zip(documents, chosen, strict=True) if c]
    stream = [i for d in kept for i in d]
    firsts = {sum(map(len, kept[:n])) for n in range(len(kept))}
    trainer = Trainer(config, Mesh({}), CPU)
    split = validation_batches(config, corpus)
    nats = []
    with torch.no_grad():
        for place in range(1, len(stream)):
            if place in firsts:
                continue  # the first token of a document
            begin = (place - 1) // 16 * 16
            window = torch.tensor([stream[begin : begin + 16]])
            targets = torch.full_like(window, NOT_COUNTED)
            targets[0, place - 1 - begin] = stream[place]
            positions = torch.arange(window.shape[1])[None]
            nats.append(float(trainer.built.model(Batch(window, targets, positions, torch.zeros_like(window))).loss))
    assert len(nats) == split.counted == len(stream) - len(kept)
    assert trainer.evaluate(split) == pytest.approx(sum(nats) / len(nats), rel=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_finds_the_same(config, layout):
    (one,) = trained_and_evaluated(config)
    found = trained_and_evaluated(replace(config, layout))
    assert len(set(found)) == 1 and found[0] == pytest.approx(one, rel=1e-12)


def test_training_and_evaluation_share_no_document(config, tmp_path):
    """Documents say which side they are on: two sources, one epoch of either side."""
    paths = []
    for source, count in enumerate((60, 40)):
        chosen = held_out(count, 0.2, config.train.seed, source)
        texts = ["held"[: 1 + n % 4] * 9 if c else "KEPT"[: 1 + n % 4] * 9 for n, c in enumerate(chosen)]
        paths.append(tmp_path / f"{source}.jsonl")
        paths[-1].write_text("\n".join(json.dumps({"text": t}) for t in texts))
    config = replace(config, {"data.path": tuple(map(str, paths)), "data.cache": str(tmp_path / "cache")})
    corpus = open_tokens(config.data)
    batches, split = global_batches(config, corpus), validation_batches(config, corpus)
    steps = -(-sum(batches.samples) // config.train.global_batch)
    trained = {int(i) for s in range(steps) for b in batches.microbatches_of(s) for i in b.tokens.flatten()}
    evaluated = {int(i) for n in range(len(split)) for i in split.batch(n).tokens.flatten()}
    assert trained == {*b"KEPT", 245} and evaluated == {*b"held", 245, 0}  # 0 fills up the last batch


def test_batch_size_does_not_matter(config):
    corpus = open_tokens(config.data)
    trainer = Trainer(config, Mesh({}), CPU)
    (tokens,) = corpus.sources
    packed = [Packed(tokens, held_out(100, 0.2, config.train.seed, 0))]
    losses = [trainer.evaluate(HeldOut(packed, 16, rows)) for rows in (1, 3, 7, 1000)]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-12)


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_trace(config, ranks):
    """Steps with evaluations between them, and one amid a step, are bitwise those without; so is the traffic."""
    config = replace(config, {"dp.degree": ranks, "train.deterministic": True})

    def body(trainer, corpus, looks):
        batches = global_batches(config, corpus)
        split = validation_batches(config, corpus)
        numbers = []
        for step in range(3):
            totals = trainer.backward(batches.microbatches_of(step))
            before = {n: g.clone() for n, _, g in trainer.storage.gradients()}
            states = torch.get_rng_state(), random.getstate()
            for _ in range(looks):
                trainer.evaluate(split)
            assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
            assert all(torch.equal(before[n], g) for n, _, g in trainer.storage.gradients())
            assert all(p.grad is None for p in trainer.built.model.parameters())
            numbers.append(trainer.update(step, totals))
            for _ in range(looks):
                trainer.evaluate(split)
        ledger = trainer.mesh.ledger
        steps = {k: v for k, v in ledger.bytes.items() if k.phase != EVAL}
        weights = {n: w.clone() for n, _, w in trainer.storage.weights()}
        return numbers, steps, weights, {k for k in ledger.bytes if k.phase == EVAL}

    plain = on_ranks(config, lambda *a: body(*a, looks=0))
    looked = on_ranks(config, lambda *a: body(*a, looks=2))
    for (numbers, steps, weights, none), (numbers2, steps2, weights2, traffic) in zip(plain, looked, strict=True):
        assert numbers == numbers2 and steps == steps2
        assert all(torch.equal(weights[n], weights2[n]) for n in weights)
        assert not none
        assert {(k.axis, k.purpose) for k in traffic} == (
            {("stage", "expert counts"), ("world", "loss")} if ranks > 1 else set()
        )


def test_waiting_in_an_evaluation_is_no_part_of_a_step(config):
    config = replace(config, {"dp.degree": 2})

    def body(trainer, corpus):
        trainer.evaluate(validation_batches(config, corpus))
        return trainer.mesh.ledger.settle()

    assert on_ranks(config, body) == [{}, {}]


@pytest.mark.parametrize(("steps", "at"), [(5, [2, 4, 5]), (4, [2, 4]), (1, [1])])
def test_the_row(config, steps, at):
    """When it is evaluated, and what is made of the last loss. With a BPE, so that tokens are not bytes."""
    changes = {"train.steps": steps, "train.warmup_steps": 0, "data.tokenizer": "bpe", "data.bpe_vocab": 300}
    config = replace(config, {**changes, "model.vocab": 300})
    row = run(config, Place(0, 1, 0, 1), CPU)
    assert [step for step, _ in row.evals] == at and row.eval_loss == row.evals[-1][1]
    assert row.perplexity == math.exp(row.eval_loss)
    corpus = open_tokens(config.data)
    (tokens,) = corpus.sources
    chosen = held_out(100, 0.2, config.train.seed, 0)
    texts = [json.loads(line)["text"] for line in Path(config.data.path[0]).read_text().splitlines()]
    text_bytes = sum(len(t.encode()) for t, c in zip(texts, chosen, strict=True) if c)
    counted = int(np.diff(tokens.offsets)[chosen].sum()) - int(chosen.sum())  # less the first of each document
    assert counted < 0.9 * text_bytes
    assert row.bits_per_byte == pytest.approx(row.eval_loss * counted / math.log(2) / text_bytes, rel=1e-12)
    assert repr(record.load(config.record.folder)) == repr([row])  # NaN does not equal itself
    trainer = Trainer(config, Mesh({}), CPU)
    steps_of = list(train(trainer, global_batches(config, corpus).microbatches_of, validation_batches(config, corpus)))
    assert [s.eval_loss for s in steps_of if s.eval_loss is not None] == [loss for _, loss in row.evals]
    assert [s.loss for s in steps_of] == row.losses


def test_bytes_of_a_row_are_those_of_steps(config):
    config = replace(config, {"dp.degree": 2})
    rows = [start(partial(run, c), 2, c.launch, LIMIT_S)[0] for c in (config, replace(config, {"train.eval_every": 0}))]
    assert len(rows[0].evals) == 3 and rows[0].comm_bytes == rows[1].comm_bytes and rows[0].comm_bytes


def test_tensorboard_and_trace_tell_evaluations(config, tmp_path):
    config = replace(config, {"record.tensorboard": True, "record.profile": True})
    row = start(partial(run, config), 1, config.launch, LIMIT_S)[0]
    board = EventAccumulator(str(tmp_path / "tensorboard" / row.run_id)).Reload()
    found = [(e.step + 1, e.value) for e in board.Scalars("loss/held_out")]
    assert found == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in row.evals]
    trace = json.loads((tmp_path / "traces" / f"{row.run_id}.json").read_text())
    assert {"forward 2", "backward 2", "eval 0", "eval 3"} <= {e.get("name") for e in trace["traceEvents"]}


def test_without_evaluation_the_row_is_empty_there(config):
    config = replace(config, {"train.eval_every": 0, "train.steps": 1, "train.warmup_steps": 0})
    row = run(config, Place(0, 1, 0, 1), CPU)
    assert (row.evals, row.eval_loss, row.perplexity, row.bits_per_byte) == ([], None, None, None)
    path = record.row_path(row_folder := config.record.folder, row.run_id)
    tree = json.loads(path.read_text())
    for name in ("evals", "eval_loss", "perplexity", "bits_per_byte"):
        del tree[name]  # as rows were before there were evaluations
    path.write_text(json.dumps(tree))
    assert repr(record.load(row_folder)) == repr([row])


def test_bits_per_byte_are_unknown_of_ids(config, tmp_path):
    """The ids of the cache are a source by themselves, with the same documents."""
    config = replace(config, {"train.steps": 2, "data.cache": str(tmp_path / "cache")})
    from_text = run(config, Place(0, 1, 0, 1), CPU)
    (ids,) = (tmp_path / "cache").glob("*.bin")
    config = replace(config, {"data.path": (str(ids),), "data.cache": str(tmp_path / "other")})
    row = run(config, Place(0, 1, 0, 1), CPU)
    assert row.evals == from_text.evals and row.losses == from_text.losses
    assert from_text.bits_per_byte is not None and row.bits_per_byte is None


def test_a_single_document_cannot_be_split(text, tmp_path, config):
    config = replace(config, {"data.path": (str(text),), "data.cache": str(tmp_path / "cache")})
    with pytest.raises(ValueError, match=r"text\.txt"):
        run(config, Place(0, 1, 0, 1), CPU)


def test_float32_losses_add_up_in_float64(config):
    """The mean over many batches keeps its digits."""
    config = replace(config, {"train.dtype": "float32"})
    trainer = Trainer(config, Mesh({}), CPU)
    split = validation_batches(config, open_tokens(config.data))
    with torch.no_grad():
        losses = [trainer.built.model(split.batch(n)).loss for n in range(len(split))]
    assert losses[0].dtype == torch.float32
    assert trainer.evaluate(split) == pytest.approx(sum(map(float, losses)) / split.counted, rel=1e-15)


def test_an_evaluation_keeps_no_graph(config):
    """However many batches it has, no activation outlives its layer."""
    trainer = Trainer(config, Mesh({}), CPU)
    graphs = []
    trainer.built.model.register_forward_hook(lambda module, batch, output: graphs.append(output.loss.grad_fn))
    trainer.evaluate(validation_batches(config, open_tokens(config.data)))
    assert graphs and not any(graphs)


def test_planted_mean_of_means(config, monkeypatch):
    """Each rank's own mean, then their mean: ranks count unequal numbers of tokens."""
    (one,) = trained_and_evaluated(config)

    def own_mean(self, held_out):
        mine = [self._mine(held_out.batch(n)) for n in range(len(held_out))]
        weigh = Denominators(sum(int((b.targets >= 0).sum()) for b in mine), [1] * len(mine))
        totals = execute(forward_only(len(mine)), self.built, mine.__getitem__, weigh, self.storage).sum(0)
        return float(comm.all_reduce_(totals, self.world, "loss")[0] / self.world.size)

    monkeypatch.setattr(Trainer, "evaluate", own_mean)
    assert abs(trained_and_evaluated(replace(config, {"dp.degree": 2}))[0] - one) > 1e-6 * one


def test_planted_padding_that_counts(config, monkeypatch):
    (one,) = trained_and_evaluated(config)
    real = HeldOut.batch

    def counts(self, number):
        batch = real(self, number)
        return dataclasses.replace(batch, targets=batch.targets.masked_fill(batch.targets < 0, 0))

    monkeypatch.setattr(HeldOut, "batch", counts)
    assert abs(trained_and_evaluated(config)[0] - one) > 1e-3 * one


def test_planted_dropped_tail(config, monkeypatch):
    (one,) = trained_and_evaluated(config)
    real = HeldOut.__len__
    monkeypatch.setattr(HeldOut, "__len__", lambda self: real(self) - 1)
    assert abs(trained_and_evaluated(config)[0] - one) > 1e-3 * one
