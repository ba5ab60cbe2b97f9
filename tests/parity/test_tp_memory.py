"""What is kept for backward: a GPT block by Korthikanti et al. 2022, and our own layer by the formula of the README.

B batch, S tokens of a sample, s of them on this rank, h width, a heads, n tp ranks
"""

import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import experiments
from research.build import build
from research.config import LaunchConfig, replace
from research.data.tokens import open_tokens
from research.launch.local import start
from research.mesh import Mesh, total_ranks
from research.models.products import Products
from research.models.rope import places
from research.models.seams import one_device
from research.parallel.axis import cut_batch
from research.parallel.tp import products
from research.parallel.tp.cost import layer_bytes
from research.reproduce.cells import known, table
from research.settings import load
from research.train.memory import MemoryMeter
from research.train.run import global_batches

PAPERS = Path(experiments.__file__).parent / "papers"
SAMPLES, LENGTH, WIDTH, HEADS = 2, 24, 64, 8


def dropout(x):
    return torch.native_dropout(x, 0.1, True)[0]  # keeps a mask of one byte each


def core(q, k, v):
    """(B, a/n, S, h/a) each. A causal mask would be added to the scores, and keep nothing."""
    return dropout((q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)) @ v


def gpt_block(column, row, weights, selective, x):
    """(B, s, h) -> (B, s, h), as figure 2 of the paper has it."""
    wq, wk, wv, wo, w1, w2, *norms = weights
    qkv = column(F.layer_norm(x, (WIDTH,), *norms[:2]), wq, wk, wv)
    q, k, v = (t.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for t in qkv)
    o = checkpoint(core, q, k, v, use_reentrant=True) if selective else core(q, k, v)
    x = x + dropout(row(o.transpose(1, 2).flatten(2), wo))
    (hidden,) = column(F.layer_norm(x, (WIDTH,), *norms[2:]), w1)
    return x + dropout(row(F.gelu(hidden), w2))


def saved_bytes(run, x, weights):
    """Bytes of the saved storages, each once, without weights; and, as in the paper, without the mean and variance of
    each token, nor the state of the random generator."""
    storages = {}

    def pack(t):
        if (t.numel() > SAMPLES * LENGTH and t.is_floating_point()) or t.dtype == torch.bool:
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        y = run(x)
    del y
    return sum(n for where, n in storages.items() if where not in {w.untyped_storage().data_ptr() for w in weights})


def gpt_bytes(place, device):
    """By row of table 2, what this rank keeps."""
    group, n = Mesh({"tp": place.world}, place.rank).group("tp"), place.world
    shapes = [(WIDTH // n, WIDTH)] * 3 + [(WIDTH, WIDTH // n), (4 * WIDTH // n, WIDTH), (WIDTH, 4 * WIDTH // n)]
    leaf = partial(torch.randn, dtype=torch.bfloat16, requires_grad=True)
    weights = [leaf(shape) for shape in shapes + [(WIDTH,)] * 4]
    plain = Products()
    alone = one_device(plain)
    repeated = alone.column, products.row(group, plain, False, 1) if n > 1 else alone.row
    cut = (products.column(group, plain, 1, False), products.row(group, plain, True, 1)) if n > 1 else repeated
    x, part = leaf(SAMPLES, LENGTH, WIDTH), leaf(SAMPLES, LENGTH // n, WIDTH)

    def kept(seams, x, selective=False):
        return saved_bytes(lambda x: gpt_block(*seams, weights, selective, x), x, weights)

    def whole(x):
        return checkpoint(lambda x: gpt_block(*repeated, weights, False, x), x, use_reentrant=True)

    return {
        "no parallelism (eq.1)" if n == 1 else "TP (eq.2)": kept(repeated, x),
        "TP+SP (eq.4)": kept(cut, part),
        "TP + selective recompute": kept(repeated, x, True),
        "TP+SP + selective recompute": kept(cut, part, True),
        "full recompute": saved_bytes(whole, x, weights),
    }


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_gpt_block_keeps_what_table_2_says(n):
    s, b, h, a = LENGTH, SAMPLES, WIDTH, HEADS
    formulas = {
        "s b h (34 + 5 a s/h)": s * b * h * (34 + 5 * a * s / h),
        "s b h (10 + 24/t + 5 a s/(h t))": s * b * h * (10 + 24 / n + 5 * a * s / (h * n)),
        "s b h (34/t + 5 a s/(h t))": s * b * h * (34 / n + 5 * a * s / (h * n)),
        "s b h (10 + 24/t)": s * b * h * (10 + 24 / n),
        "s b h 34/t": s * b * h * 34 / n,
        "2 s b h": 2 * s * b * h,
    }
    rows = {r["config"]: known(formulas, r["bytes per layer"]) for r in table(PAPERS, "korthikanti", "Table 2")}
    assert len(rows) == 6
    for found in start(gpt_bytes, n, LaunchConfig(threads=1), 60.0):
        assert len(found) == 5 and found == {name: rows[name] for name in found}


def kept_by_a_layer(config, place, device):
    """Bytes that are there after a layer's forward and were not before, its input but not its output among them: that
    is the input of the next one. Also what the formula says, and the gradients."""
    mesh = Mesh.from_config(config, place.world, place.rank)
    built = build(config, mesh, device)
    model = built.model.bfloat16() if config.train.dtype == "bfloat16" else built.model
    layer = model.layers["1"]
    batch = cut_batch(global_batches(config, open_tokens(config.data)).microbatches_of(0)[0], config, mesh)
    x = model.embedding(batch.tokens).detach().requires_grad_()
    at = places(batch, config.model, x.dtype)
    expected = layer_bytes(config, batch.tokens.numel())
    with MemoryMeter({"parameters": model.parameters(), "input": [x]}, mesh.ledger) as meter:
        y, aux = model._run(layer, at, x)
        for _ in range(200):  # the backend lets go of what it sent a moment after it has arrived
            kept = meter._live.total() - meter._live["parameters"] - y.untyped_storage().nbytes() - aux.nbytes
            if kept > expected:
                time.sleep(0.01)
        gradients = torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))
    return kept, expected, gradients


def each_recompute(config, place, device):
    kinds = ("none", "selective", "full")
    found = {k: kept_by_a_layer(replace(config, {"train.recompute": k}), place, device) for k in kinds}
    gradients = [found[k][2] for k in kinds]
    equal = all(torch.equal(*pair) for other in gradients[1:] for pair in zip(gradients[0], other, strict=True))
    return [found[k][:2] for k in kinds], equal


@pytest.mark.parametrize(
    "words",
    [
        "train.dtype=bfloat16",
        "tp.degree=2",
        "tp.degree=2 tp.sequence=false train.dtype=bfloat16",
        "tp.degree=2 tp.keep_gathered=true tp.overlap=3 train.dtype=bfloat16",
        "tp.degree=4 tp.overlap=2 train.dtype=bfloat16",  # two ranks with a copy of each kv head
        "tp.degree=4 tp.sequence=false",
    ],
)
def test_our_layer_keeps_what_the_readme_says(text, tmp_path, words):
    given = [f"data.path={text}", f"data.cache={tmp_path}", "model.experts=0", "train.dtype=float32", *words.split()]
    config = load("experiments/configs/tiny.yaml", given)
    for found, equal in start(partial(each_recompute, config), total_ranks(config), config.launch, 100.0):
        kept = [bytes_ for bytes_, _ in found]
        assert kept == [expected for _, expected in found]
        assert kept[0] > kept[1] > kept[2]  # none, selective, full
        assert equal  # gradients, to the bit
