"""What tensor parallelism receives, label by label, against the closed formulas of its README."""

from fractions import Fraction

import pytest

from research.data.tokens import open_tokens
from research.launch.local import start
from research.mesh import Mesh, total_ranks
from research.parallel import tp
from research.parallel.tp.cost import traffic
from research.settings import load
from research.train.loop import Trainer
from research.train.run import global_batches


def received(config, place, device):
    """Bytes of the tp axis in one step, by "purpose/op/phase"; gradients are the storage's."""
    trainer = Trainer(config, Mesh.from_config(config, place.world, place.rank), device)
    trainer.backward(global_batches(config, open_tokens(config.data)).microbatches_of(0))
    counted = trainer.mesh.ledger.bytes.items()
    return {"/".join(label[1:]): n for label, n in counted if label.axis == "tp" and label.purpose != "gradients"}


def bytes_of(text, folder, *words):
    given = [f"data.path={text}", f"data.cache={folder}", *words]
    config = load("experiments/configs/tiny.yaml", given)
    return config, start(lambda p, d: received(config, p, d), total_ranks(config), config.launch, 60.0)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize(
    "words, per_layer",
    [
        ("tp.sequence=false", 8),
        ("tp.sequence=false tp.overlap=3", 8),
        ("tp.keep_gathered=true", 8),
        ("", 10),
        ("tp.overlap=3", 10),
    ],
)
def test_elements_of_a_layer(text, tmp_path, degree, words, per_layer):
    config, ranks = bytes_of(text, tmp_path, "model.experts=0", f"tp.degree={degree}", *words.split())
    stream = config.train.global_batch * config.data.sequence * config.model.dim  # over all microbatches
    for found in ranks:
        layers = sum(n for label, n in found.items() if label.startswith(("column", "row")))
        assert layers == per_layer * Fraction(degree - 1, degree) * stream * config.model.layers * 8  # bytes of float64


GRID = [
    "",
    "train.recompute=full",
    "tp.keep_gathered=true train.recompute=full tp.overlap=3",
    "tp.sequence=false",
    "tp.sequence=false train.recompute=full",
    "tp.sequence=false train.recompute=full model.norm=sandwich model.shared_experts=0",
    "tp.sequence=false model.experts=0 model.vocab=257 train.dtype=bfloat16",
    "model.shared_experts=0 model.norm=post train.dtype=bfloat16",
    "model.moe_every=2 model.qk_norm=all train.recompute=full train.dtype=float32",
    "model.attention=mla model.rotary_dim=4 model.mtp_depth=2 train.microbatches=3 tp.overlap=2",
    "model.mtp_depth=1 model.qk_norm=all train.recompute=full tp.sequence=false train.dtype=bfloat16",
    "dp.degree=2 train.global_batch=15",
]


@pytest.mark.parametrize("words", GRID)
def test_a_step_receives_what_the_formula_says(text, tmp_path, words):
    config, ranks = bytes_of(text, tmp_path, "tp.degree=2", *words.split())
    assert ranks[0] == traffic(config)
    assert ranks[:2] == ranks[:1] * 2


def test_three_ranks_in_four(text, tmp_path):
    config, ranks = bytes_of(text, tmp_path, "tp.degree=4", "model.norm=output", "model.kv_heads=1")
    assert ranks == [traffic(config)] * 4


def test_one_rank_receives_nothing():
    assert traffic(load("experiments/configs/tiny.yaml")) == {}


def test_planted_tokens_dispatched_by_every_rank(text, tmp_path, monkeypatch):
    """Gradients stay right where each rank sends all repeated tokens to the experts: the ledger alone tells."""
    monkeypatch.setattr(tp.TensorParallel, "wraps", lambda self, config, mesh: {})
    config, ranks = bytes_of(text, tmp_path, "tp.degree=2", "tp.sequence=false")
    assert ranks[0] != traffic(config)
