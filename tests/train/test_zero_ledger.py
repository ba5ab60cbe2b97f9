"""What ZeRO receives, label by label, against the closed formulas of its README; volumes of the paper."""

import operator
from collections import Counter
from fractions import Fraction
from functools import reduce

import pytest
import torch

from research.data.tokens import open_tokens
from research.launch.local import start
from research.mesh import Mesh, total_ranks
from research.parallel.dp.cost import traffic
from research.settings import load
from research.train.loop import Trainer
from research.train.run import global_batches

OURS = ("gradients", "parameters", "copies")


def received(config, place, device):
    """Bytes of gradients and parameters in the second step, by "purpose/op/phase"."""
    trainer = Trainer(config, Mesh.from_config(config, place.world, place.rank), device)
    batches = global_batches(config, open_tokens(config.data))
    for step in range(2):
        trainer.mesh.ledger.bytes.clear()
        trainer.update(step, trainer.backward(batches.microbatches_of(step)))
    found: dict[str, Fraction] = {}
    for label, n in trainer.mesh.ledger.bytes.items():
        if label.purpose in OURS and label.op != "receive":
            found["/".join(label[1:])] = found.get("/".join(label[1:]), Fraction(0)) + n
    return found


def bytes_of(text, folder, *words):
    small = ["model.layers=2", "data.sequence=16", "train.dtype=float32"]
    config = load("experiments/configs/tiny.yaml", [f"data.path={text}", f"data.cache={folder}", *small, *words])
    return config, start(lambda p, d: received(config, p, d), total_ranks(config), config.launch, 60.0)


GRID = [
    "dp.zero=0 dp.degree=2 train.dtype=bfloat16 dp.grad_dtype=bfloat16",
    "dp.zero=1 dp.degree=3",
    "dp.zero=2 dp.degree=4 dp.replicas=2 train.microbatches=4",
    "dp.zero=3 dp.degree=2 tp.degree=2 train.dtype=bfloat16 train.recompute=full",
    "dp.zero=3 dp.degree=2 model.tied=true model.mtp_depth=2 model.vocab=257",
    "dp.zero=3 dp.degree=2 model.tied=true model.mtp_depth=2 dp.keep_gathered=true",
]


@pytest.mark.parametrize("words", GRID)
def test_ledger_equals_the_formula(text, tmp_path, words):
    config, ranks = bytes_of(text, tmp_path, *words.split())
    assert all(found == traffic(config) for found in ranks), (ranks[0], traffic(config))


@pytest.mark.parametrize(
    "words",
    [
        "pp.schedule=1f1b model.tied=true",
        "pp.schedule=dualpipe train.microbatches=4 model.layers=4",
        "pp.schedule=zbv train.microbatches=4 model.layers=4 model.mtp_depth=1 model.tied=true dp.degree=2 dp.zero=1",
        "pp.schedule=zb_h1 train.microbatches=4 dp.degree=2 dp.zero=2",
        "pp.schedule=1f1b train.microbatches=4 model.tied=true model.mtp_depth=1 dp.degree=2 dp.zero=3",
        "pp.schedule=dualpipe_v train.microbatches=4 model.layers=4 model.tied=true dp.degree=2 dp.zero=3",
    ],
)
def test_stages_receive_what_the_formula_says(text, tmp_path, words):
    """Of each label the most that any rank receives; passes of a split backward (B, W) together."""

    def by_op(received):
        found = Counter()
        for label, n in received.items():
            purpose, op, phase = label.split("/")
            found[f"{purpose}/{op}/{'F' if phase == 'F' else 'optimizer' if phase == 'optimizer' else 'BW'}"] += n
        return found

    config, ranks = bytes_of(text, tmp_path, "pp.degree=2", *words.split())
    most = reduce(operator.or_, map(by_op, ranks))
    assert dict(most) == traffic(config)


@pytest.mark.parametrize("zero, volume", [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_volume_of_one_microbatch(text, tmp_path, zero, volume):
    """Section 7: elements that a rank receives, over (n-1)/n of the parameters."""
    config, ranks = bytes_of(text, tmp_path, f"dp.zero={zero}", "dp.degree=2", "train.microbatches=1")
    model = Trainer(config, Mesh({}), torch.device("cpu")).built.model
    assert sum(ranks[0].values()) == Fraction(volume, 2) * 4 * sum(p.numel() for p in model.parameters())
