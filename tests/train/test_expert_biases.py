"""Selection biases: moved by the optimizer step alone, from the choices of the whole step."""

import pytest
import torch

from research.config import replace
from research.data.tokens import open_tokens
from research.mesh import Mesh
from research.models import moe
from research.models.moe import MoE
from research.settings import load
from research.train import optim
from research.train.loop import Trainer
from research.train.run import global_batches, validation_batches


@pytest.fixture
def config(text, tmp_path):
    words = [f"data.path={text}", f"data.cache={tmp_path}/cache", "model.bias_rate=0.25", "model.layers=2"]
    return load("experiments/configs/tiny.yaml", words)


def layer_of(trainer):
    (layer,) = (m for m in trainer.built.model.modules() if isinstance(m, MoE))
    return layer


def trained(config, steps=1):
    trainer = Trainer(config, Mesh({}), torch.device("cpu"))
    batches = global_batches(config, open_tokens(config.data))
    for step in range(steps):
        trainer.update(step, trainer.backward(batches.microbatches_of(step)))
    return trainer


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_step_moves_each_bias_by_the_rate(config, recompute, monkeypatch):
    chosen = []
    real = moe.choose
    monkeypatch.setattr(moe, "choose", lambda scores, c: chosen.append(real(scores, c)) or chosen[-1])
    trainer = trained(replace(config, {"train.recompute": recompute}))
    assert len(chosen) == config.train.microbatches  # recompute chooses nothing again
    counts = torch.cat(chosen).flatten().bincount(minlength=config.model.experts).double()
    bias = layer_of(trainer).bias
    assert torch.equal(bias, 0.25 * torch.sign(counts.mean() - counts))
    assert bias.grad is None and layer_of(trainer).counted == []


def test_a_skipped_step_moves_none(config):
    trainer = Trainer(replace(config, {"train.nonfinite": "skip"}), Mesh({}), torch.device("cpu"))
    batch = global_batches(config, open_tokens(config.data)).microbatches_of(0)
    sums = trainer.backward(batch)
    trainer.storage.buckets[0].flat[0] = torch.nan
    trainer.update(0, sums)
    layer = layer_of(trainer)
    assert not layer.bias.any() and layer.counted == []


def test_an_evaluation_counts_nothing(tmp_path, config):
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(f'{{"text": "line {i} of many short ones"}}\n' for i in range(50)))
    config = replace(config, {"data.path": (str(lines),), "data.heldout": 0.5})
    trainer = Trainer(config, Mesh({}), torch.device("cpu"))
    trainer.evaluate(validation_batches(config, open_tokens(config.data)))
    assert layer_of(trainer).counted == []


def test_biases_even_out_a_skewed_router(config):
    """Without any auxiliary loss, and with a router that all but ignores half of the experts."""

    def unevenness(rate):
        still = {"model.bias_rate": rate, "model.balance": 0.0, "model.z_loss": 0.0, "train.lr": 0.0}
        trainer = Trainer(replace(config, still), Mesh({}), torch.device("cpu"))
        layer = layer_of(trainer)
        layer.router.data[:4] *= 30
        batches = global_batches(config, open_tokens(config.data))
        total = torch.zeros(config.model.experts)
        for step in range(40):
            sums = trainer.backward(batches.microbatches_of(step))
            total += torch.stack(layer.counted).sum(0)[0] if step >= 20 else 0
            trainer.update(step, sums)
        return float(total.max() / total.mean())

    assert unevenness(0.01) < 1.5 < 2.0 < unevenness(1e-9)


def test_planted_counts_of_one_microbatch(config, monkeypatch):
    """The choices of the first microbatch alone: a sign hides a wrong factor, not wrong counts."""
    config = replace(config, {"train.microbatches": 8})
    real = optim.move_biases
    right = layer_of(trained(config)).bias.clone()

    def first_microbatch_only(built, good):
        layer = next(m for m in built.model.modules() if isinstance(m, MoE))
        del layer.counted[1:]
        real(built, good)

    monkeypatch.setattr("research.train.loop.move_biases", first_microbatch_only)
    assert not torch.equal(layer_of(trained(config)).bias, right)
