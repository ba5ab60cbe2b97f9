"""An independent oracle for stage 3: torch's fully_shard, from the same weights on the same batches."""

import pytest
from torch.distributed.fsdp import fully_shard

from research.build import build
from research.data.tokens import open_tokens
from research.launch.local import start
from research.mesh import Mesh
from research.parallel.dp.shards import Sharded
from research.settings import load
from research.train.loop import Trainer
from research.train.optim import adamw, learning_rate
from research.train.run import global_batches

STEPS, RANKS = 5, 2


def ours(config, place, device):
    trainer = Trainer(config, Mesh.from_config(config, place.world, place.rank), device)
    batches = global_batches(config, open_tokens(config.data))
    for step in range(STEPS):
        trainer.update(step, trainer.backward(batches.microbatches_of(step)))
    return {name: (box, weight.clone()) for name, box, weight in trainer.storage.weights()}


def theirs(config, place, device):
    """Averages over ranks, whose parts have as many tokens; without experts, so that nothing else is global, and
    without clipping, which adds 1e-6 to the norm there."""
    model = build(config, Mesh({}), device).model
    for layer in model.layers.values():
        fully_shard(layer)
    fully_shard(model)
    optimizer = adamw(config.train, [(p, p.dim() > 1) for p in model.parameters()])
    batches = global_batches(config, open_tokens(config.data))
    for step in range(STEPS):
        (whole,) = batches.microbatches_of(step)
        batch = whole.numbered().part(place.rank, place.world)
        (model(batch).loss / (batch.targets >= 0).sum()).backward()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.train, step)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}


@pytest.fixture
def config(text, tmp_path):
    words = [f"data.path={text}", f"data.cache={tmp_path}/cache", "dp.zero=3", f"dp.degree={RANKS}"]
    small = ["model.experts=0", "model.layers=3", "data.sequence=32", "train.microbatches=1", "train.clip=0"]
    return load("experiments/configs/tiny.yaml", [*words, *small])


def worst(config):
    """The largest relative difference of a weight, over all shards."""
    shards = start(lambda p, d: ours(config, p, d), RANKS, config.launch, 60.0)
    want = start(lambda p, d: theirs(config, p, d), RANKS, config.launch, 60.0)[0]
    errors = []
    for rank in shards:
        for name, (box, weight) in rank.items():
            part = want[name][tuple(slice(low, low + size) for low, size in box)]
            inside = weight[tuple(slice(size) for _, size in box)]
            errors.append(float((inside - part).norm() / part.norm()))
    assert len(errors) == RANKS * len(want)
    return max(errors)


def test_weights_after_five_steps_equal_fully_shard(config):
    assert worst(config) < 1e-9


def test_planted_microbatch_that_is_lost(config, monkeypatch):
    """One rank's part of one bucket does not arrive."""

    def deaf(self, name, grad, real=Sharded.add):
        real(self, name, grad * 0 if name == "layers.1.ffn.w_up" and self.ranks.shards.rank == 1 else grad)

    monkeypatch.setattr(Sharded, "add", deaf)
    assert worst(config) > 1e-6
