"""What context parallelism receives, label by label, against the closed formulas of its README."""

from fractions import Fraction

import pytest

from research.data.tokens import open_tokens
from research.launch.local import start
from research.mesh import Mesh, total_ranks
from research.parallel.cp.cost import traffic
from research.settings import load
from research.train.loop import Trainer
from research.train.run import global_batches


def received(config, place, device):
    """Bytes of the cp axis in one step, by "purpose/op/phase"; gradients of parameters are the storage's."""
    trainer = Trainer(config, Mesh.from_config(config, place.world, place.rank), device)
    trainer.backward(global_batches(config, open_tokens(config.data)).microbatches_of(0))
    counted = trainer.mesh.ledger.bytes.items()
    return {"/".join(label[1:]): n for label, n in counted if label.axis == "cp" and label.purpose != "gradients" and n}


def bytes_of(text, folder, *words):
    config = load("experiments/configs/tiny.yaml", [f"data.path={text}", f"data.cache={folder}", *words])
    return config, start(lambda p, d: received(config, p, d), total_ranks(config), config.launch, 60.0)


GRID = [
    "cp.degree=2",
    "cp.degree=4 cp.balance=none train.recompute=full train.dtype=bfloat16",
    "cp.degree=4 cp.balance=striped model.window=20 model.window_from=2",
    "cp.degree=4 cp.balance=none model.window=20",
    "cp.degree=4 cp.method=all_gather train.dtype=bfloat16 model.mtp_depth=1",
    "cp.degree=4 cp.method=ulysses model.kv_heads=2",
    "cp.degree=2 cp.method=ulysses model.kv_heads=8 train.recompute=full",
    "cp.degree=4 cp.method=hybrid cp.ulysses=2 model.attention=mla model.rotary_dim=4 model.value_dim=12",
    "cp.degree=2 tp.degree=2 dp.degree=2 train.global_batch=12 tp.sequence=false",
    "cp.degree=2 tp.degree=4 cp.balance=striped train.dtype=float32",
]


@pytest.mark.parametrize("words", GRID)
def test_a_step_receives_what_the_formula_says(text, tmp_path, words):
    config, ranks = bytes_of(text, tmp_path, *words.split())
    each = config.tp.degree
    assert ranks == [traffic(config, rank // each % config.cp.degree) for rank in range(len(ranks))]
    most = max(ranks, key=lambda found: sum(found.values()))
    assert sum(traffic(config).values()) == sum(most.values())


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("balance", ["none", "zigzag", "striped"])
def test_elements_of_a_full_ring(text, tmp_path, n, balance):
    """The rank that receives most: 2 (n-1)/n b L d G/H forward, twice that in backward."""
    config, ranks = bytes_of(text, tmp_path, f"cp.degree={n}", f"cp.balance={balance}", "model.experts=0")
    c = config.model
    stream = config.train.global_batch * config.data.sequence * c.heads * c.head_dim  # b L d, over all microbatches
    unit = Fraction(n - 1, n) * stream * Fraction(c.kv_heads, c.heads) * c.layers * 8  # bytes of float64
    forward, again, back = (
        max(found.get(f"{label}", 0) for found in ranks)
        for label in (
            "keys and values/exchange/F",
            "keys and values/exchange/BW",
            "gradients of keys and values/exchange/BW",
        )
    )
    assert forward == again == 2 * unit and back <= 2 * unit
    if balance == "striped":
        assert back == 2 * unit
