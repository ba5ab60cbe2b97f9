"""What is counted equals the closed formulas, per label, exactly."""

from fractions import Fraction

import pytest

from research.data.tokens import open_tokens
from research.launch.local import start
from research.ledger import Label
from research.mesh import Mesh, total_ranks
from research.settings import load
from research.train.loop import Trainer, train
from research.train.run import global_batches


def counted(config):
    def body(place, device):
        trainer = Trainer(config, Mesh.from_config(config, place.world, place.rank), device)
        waits = {}
        for step in train(trainer, global_batches(config, open_tokens(config.data)).microbatches_of):
            waits |= step.exposed_ms
        numel = sum(p.numel() for p in trainer.built.model.parameters())
        return dict(trainer.mesh.ledger.bytes), dict(trainer.mesh.ledger.calls), numel, waits

    return start(body, total_ranks(config), config.launch, 60.0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("extra", ["", "train.dtype=bfloat16 train.bucket_mib=0.01 train.recompute=full"])
def test_dp_bytes(text, tmp_path, ranks, extra):
    words = ["train.steps=3", "train.warmup_steps=1", "train.dtype=float32", f"dp.degree={ranks}", *extra.split()]
    config = load("experiments/configs/tiny.yaml", [f"data.path={text}", f"data.cache={tmp_path}/cache", *words])
    steps, microbatches, moe_layers, experts = 3, 2, 3, 8
    for got, calls, numel, waits in counted(config):
        if ranks == 1:
            assert not got and not waits
            continue
        share = Fraction(2 * (ranks - 1), ranks)
        assert got == {
            Label("dp", "gradients", "all_reduce", "BW"): steps * share * numel * 4,
            # int64 counts, once a microbatch and MoE layer, with recompute too
            Label("stage", "expert counts", "all_reduce", "F"): share * 8 * experts * steps * microbatches * moe_layers,
            Label("world", "loss", "all_reduce", "optimizer"): share * 2 * 4 * steps * microbatches,
            Label("world", "gradient norm", "all_reduce", "optimizer"): share * 4 * steps,
        }
        assert calls[Label("stage", "expert counts", "all_reduce", "F")] == steps * microbatches * moe_layers
        assert set(waits) == {"dp", "stage", "world"} and all(ms > 0 for ms in waits.values())


def test_gradients_travel_once_a_step(text, tmp_path):
    """Microbatches add up here; only the last backward is followed by the reduction."""
    words = [f"data.path={text}", f"data.cache={tmp_path}/cache", "train.steps=2", "train.warmup_steps=1"]
    layouts = [[*words, "dp.degree=2", f"train.microbatches={m}"] for m in (1, 8)]
    configs = [load("experiments/configs/tiny.yaml", layout) for layout in layouts]
    sides = [counted(config)[0][0] for config in configs]
    label = Label("dp", "gradients", "all_reduce", "BW")
    assert sides[0][label] == sides[1][label] > 0
