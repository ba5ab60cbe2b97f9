"""What tensor parallelism receives, label by label, against the closed formulas of its README."""

from collections import Counter
from fractions import Fraction

import pytest

from research.data.tokens import open_tokens
from research.launch.local import start
from research.mesh import Mesh, total_ranks
from research.settings import load
from research.train.loop import Trainer
from research.train.run import global_batches


def received(config, place, device):
    """Bytes of the tp axis in one step, by (purpose, op, phase)."""
    trainer = Trainer(config, Mesh.from_config(config, place.world, place.rank), device)
    trainer.backward(global_batches(config, open_tokens(config.data)).microbatches_of(0))
    return {label[1:]: n for label, n in trainer.mesh.ledger.bytes.items() if label.axis == "tp"}


def bytes_of(text, folder, *words):
    given = [f"data.path={text}", f"data.cache={folder}", "model.experts=0", *words]
    config = load("experiments/configs/tiny.yaml", given)
    first, *others = start(lambda p, d: received(config, p, d), total_ranks(config), config.launch, 60.0)
    assert all(other == first for other in others)
    return config, first


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    "words, per_layer",
    [
        (["tp.sequence=false"], 8),
        (["tp.sequence=false", "tp.overlap=3"], 8),
        (["tp.keep_gathered=true"], 8),
        ([], 10),
        (["tp.overlap=3"], 10),
    ],
)
def test_elements_of_a_layer(text, tmp_path, tp, words, per_layer):
    config, found = bytes_of(text, tmp_path, f"tp.degree={tp}", *words)
    layers = sum(n for (purpose, _, _), n in found.items() if purpose in ("column", "row"))
    stream = config.train.global_batch * config.data.sequence * config.model.dim  # over all microbatches
    assert layers == per_layer * Fraction(tp - 1, tp) * stream * config.model.layers * 8  # bytes of float64


def test_lookup_and_loss(text, tmp_path):
    config, found = bytes_of(text, tmp_path, "tp.degree=2")
    tokens = config.train.global_batch * config.data.sequence
    half = tokens * config.model.dim * 8 // 2
    rest = Counter({label: n for label, n in found.items() if label[0] not in ("column", "row", "gradients")})
    assert rest == {
        ("lookup", "reduce_scatter", "F"): half,
        ("lookup", "all_gather", "BW"): half,
        ("cross entropy", "all_gather", "F"): half,
        ("cross entropy", "reduce_scatter", "BW"): half,
        ("cross entropy", "all_reduce", "F"): 3 * tokens * 8,  # of each token the largest logit, a sum and a logit
    }


def test_full_recompute_repeats_the_forward(text, tmp_path):
    _, plain = bytes_of(text, tmp_path, "tp.degree=2")
    _, again = bytes_of(text, tmp_path, "tp.degree=2", "train.recompute=full")
    for purpose, forward in (("column", "all_gather"), ("row", "reduce_scatter")):
        repeated = plain[purpose, forward, "F"]
        assert again[purpose, forward, "BW"] == plain.get((purpose, forward, "BW"), 0) + repeated
