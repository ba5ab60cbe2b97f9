"""How evenly experts were used: in the row, and as scalars of each step."""

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from research import build
from research import config as configs
from research.data.tokens import open_tokens
from research.launch.local import start
from research.mesh import Mesh, total_ranks
from research.models import moe
from research.settings import load
from research.train.loop import Trainer
from research.train.optim import max_violation
from research.train.run import global_batches, run

CPU = torch.device("cpu")
LIMIT_S = 60.0


def run_of(text, folder, *words):
    given = [f"data.path={text}", f"data.cache={folder}/cache", f"record.folder={folder}", "train.steps=3"]
    config = load("experiments/configs/tiny.yaml", [*given, "model.layers=3", "record.tensorboard=true", *words])
    (row, *_) = start(lambda place, device: run(config, place, device), total_ranks(config), config.launch, LIMIT_S)
    return config, row


def ids_of(config, monkeypatch):
    """What each MoE layer chose in each microbatch of all steps: layer -> [(T, K), ..]."""
    seen = []
    real = moe.choose
    monkeypatch.setattr(moe, "choose", lambda scores, c: seen.append(real(scores, c)) or seen[-1])
    trainer, batches = Trainer(config, Mesh({}), CPU), global_batches(config, open_tokens(config.data))
    for step in range(config.train.steps):
        trainer.update(step, trainer.backward(batches.microbatches_of(step)))
    return {"layers.1": seen[::2], "layers.2": seen[1::2]}


def counted(config, ids):
    return ids.flatten().bincount(minlength=config.model.experts)


@pytest.mark.parametrize("words", [(), ("train.recompute=full",)])
def test_the_row_tells_how_often_each_expert_was_chosen(text, tmp_path, monkeypatch, words):
    config, row = run_of(text, tmp_path, *words)
    ids = ids_of(config, monkeypatch)
    want = {name: counted(config, torch.cat(each)).tolist() for name, each in ids.items()}
    assert row.expert_choices == want
    sent = 3 * config.train.global_batch * config.data.sequence * config.model.top_k
    assert [sum(c) for c in want.values()] == [sent, sent]
    assert row.max_violation == {n: pytest.approx(max(c) / (sent / config.model.experts) - 1) for n, c in want.items()}


def test_ranks_tell_the_whole_and_scalars_are_written(text, tmp_path, monkeypatch):
    _, one = run_of(text, tmp_path)
    _, two = run_of(text, tmp_path, "dp.degree=2")
    assert two.expert_choices == one.expert_choices
    board = EventAccumulator(str(tmp_path / "tensorboard" / two.run_id)).Reload()
    for name in ("layers.1", "layers.2"):
        assert len(board.Scalars(f"routing/{name}/max_violation")) == 3
        assert [e.value for e in board.Scalars(f"routing/{name}/idle_experts")] == [0, 0, 0]
    monkeypatch.setattr(build, "summed", lambda counting, group: counting)  # planted: each rank counts its own
    _, wrong = run_of(text, tmp_path, "dp.degree=2")
    assert wrong.expert_choices != one.expert_choices


@pytest.mark.parametrize("order", ["position", "score"])
def test_dropped_choices_are_those_beyond_the_capacity_of_each_microbatch(text, tmp_path, monkeypatch, order):
    words = ("model.capacity=1.1", f"model.drop_by={order}", "train.recompute=full")
    config, row = run_of(text, tmp_path, "dp.degree=2", *words)
    tokens = config.train.global_batch * config.data.sequence // config.train.microbatches
    room = -(-11 * tokens * config.model.top_k // (10 * config.model.experts))
    for name, ids in ids_of(configs.replace(config, {"dp.degree": 1}), monkeypatch).items():
        assert row.dropped_choices[name] == sum((counted(config, i) - room).clamp(min=0) for i in ids).tolist()
        assert 0 < sum(row.dropped_choices[name]) < sum(row.expert_choices[name]) / 2
    board = EventAccumulator(str(tmp_path / "tensorboard" / row.run_id)).Reload()
    found = sum(e.value for e in board.Scalars("routing/layers.2/dropped_choices"))
    assert found == sum(row.dropped_choices["layers.2"])


def test_a_dense_model_tells_nothing(text, tmp_path):
    _, row = run_of(text, tmp_path, "model.experts=0")
    assert row.expert_choices == row.max_violation == row.dropped_choices == {}


def test_max_violation():
    assert max_violation([2, 2, 2]) == 0 and max_violation([6, 0, 0]) == 2
