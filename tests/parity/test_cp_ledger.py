"""What context parallelism receives, label by label, against the closed formulas of its README."""

import json
from fractions import Fraction
from pathlib import Path

import pytest
import yaml

from research.data.tokens import open_tokens
from research.launch.local import start
from research.mesh import Mesh, total_ranks
from research.parallel.cp import plan, starts
from research.parallel.cp.cost import traffic
from research.parallel.cp.plan import make_plan
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


def usp(scheme):
    """Factor of O(b L d) in an activation cost of USP, table 2."""
    rows = yaml.safe_load(Path("experiments/papers/usp.yaml").read_text(encoding="utf-8"))[0]["rows"]
    cost = next(row[4] for row in rows if row[0] == scheme)
    return cost.partition(" O(")[0]


@pytest.mark.parametrize("n", [2, 4])
def test_published_rows(n):
    """Each of ours is the published one less what stays where it is. USP's ring has no keys and values sent again, ours
    has: with these, and the hop home that a rank's own part needs not take, it would be 6 - 4/n."""
    words = [f"cp.degree={n}", "model.kv_heads=8", "train.global_batch=2", "train.microbatches=1", "model.layers=1"]
    words.append("data.sequence=65536")  # a ring of stripes spares one key

    def factor(method):
        config = load("experiments/configs/tiny.yaml", [*words, f"cp.method={method}", "cp.balance=striped"])
        stream = config.train.global_batch * config.data.sequence * config.model.heads * config.model.head_dim
        return sum(traffic(config).values()) / (stream * 8)

    assert usp("SP-Ulysses") == "(8/N)" and factor("ulysses") == Fraction(8, n) * Fraction(n - 1, n)
    assert usp("SP-Ring") == "4" and factor("ring") == pytest.approx(6 - 6 / n, rel=1e-4)
    assert usp("TP-sp") == "10"  # test_tp_ledger.py: 10 (n-1)/n


DOCUMENTS = "cp.degree=4 cp.balance=none model.document_mask=true train.global_batch=1 train.microbatches=1"


def test_documents_spare_what_nobody_sees(tmp_path):
    """By the plan of the sample, which ends documents within the parts of ranks."""
    path = tmp_path / "short.jsonl"
    path.write_text("".join(json.dumps({"text": f"a document of {n} squared"}) + "\n" for n in range(40)))
    words = [*DOCUMENTS.split(), f"data.path={path}", f"data.cache={tmp_path}"]
    config = load("experiments/configs/tiny.yaml", words)
    c, sequence = config.model, config.data.sequence
    (batch,) = global_batches(config, open_tokens(config.data)).microbatches_of(0)
    plans = [make_plan(4, r, "none", sequence, 0, starts(batch.documents).numpy()) for r in range(4)]
    each = c.layers * c.kv_heads * (c.head_dim + c.value_width) * 8
    ranks = start(lambda p, d: received(config, p, d), 4, config.launch, 60.0)
    for rank, (mine, found) in enumerate(zip(plans, ranks, strict=True)):
        assert found.get("keys and values/exchange/F", 0) == mine.received() * each <= rank * sequence // 4 * each
        assert found.get("gradients of keys and values/exchange/BW", 0) == mine.returned() * each
    assert sum(p.received() for p in plans) < 6 * sequence // 4


def test_planted_blocks_that_nobody_sees(text, tmp_path, monkeypatch):
    """Results stay right where all keys go all round: the ledger alone tells."""
    monkeypatch.setattr(plan, "_route", lambda owner, keys, views, n: plan.Route(owner, keys, 1, n - 1))
    plan._plan_of_whole_samples.cache_clear()
    config, ranks = bytes_of(text, tmp_path, "cp.degree=2", "cp.balance=none")
    monkeypatch.undo()
    plan._plan_of_whole_samples.cache_clear()
    assert ranks[0] != traffic(config, 0)
