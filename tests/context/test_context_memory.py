"""Activations of one rank fall as 1/cp: a million tokens under a fake process group, and 128k for real."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from research.config import CpConfig, RunConfig
from research.data.tokens import open_tokens
from research.launch.local import start
from research.mesh import Mesh, total_ranks
from research.parallel.cp import ContextParallel
from research.settings import load
from research.train.loop import Trainer
from research.train.memory import MemoryMeter, peak_bytes
from research.train.run import global_batches

HEADS, WIDTH, MILLION = 16, 16, 2**20


def attention_bytes(cp, sequence, window=0):
    """Peak of one attention, forward and backward, on each of three ranks; nothing is computed."""
    peaks = []
    for rank in (0, cp.degree // 2, cp.degree - 1):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=cp.degree)
        try:
            mesh = Mesh({"cp": cp.degree}, rank, fake=True)
            attend = ContextParallel().seams(RunConfig(cp=cp), mesh, None)["attend"]
            with FakeTensorMode(), MemoryMeter({}, mesh.ledger) as meter:
                q, k, v = (torch.empty(1, sequence // cp.degree, HEADS, WIDTH, requires_grad=True) for _ in range(3))
                o = attend(q, k, v, None, scale=1.0, window=window)
                o.backward(torch.empty_like(o))
        finally:
            dist.destroy_process_group()
        peaks.append(sum(meter.peak.values()))
    return max(peaks)


@pytest.mark.parametrize("balance", ["none", "zigzag", "striped"])
@pytest.mark.parametrize("method, ulysses", [("ring", 1), ("ulysses", 1), ("hybrid", 2)])
def test_a_million_tokens(method, ulysses, balance):
    """Twice the ranks, half the bytes, or little more while a ring is short. In units of one activation, S d elements
    over cp: inputs, output and their gradients are 8 of them, what comes, goes and is returned by kernels the rest."""
    unit = MILLION * HEADS * WIDTH * 4
    four, eight = (attention_bytes(CpConfig(n * ulysses, method, balance, ulysses), MILLION) for n in (4, 8))
    assert eight <= 0.53 * four and eight * 8 * ulysses <= 30 * unit


def test_a_window_takes_no_more():
    unit = MILLION * HEADS * WIDTH * 4
    assert attention_bytes(CpConfig(8, "ring", "none"), MILLION, window=4096) <= 25 * unit / 8


LONG = [
    "model.layers=1", "model.dense_layers=1", "model.experts=0", "model.heads=2", "model.kv_heads=2", "model.dim=16",
    "model.ffn=16", "train.dtype=float32", "train.global_batch=1", "train.microbatches=1",
]  # fmt: skip


def step_bytes(text, folder, sequence, degree):
    """Activations of a whole training step in its fullest moment, on the rank with the most."""
    words = [f"data.path={text}", f"data.cache={folder}", f"data.sequence={sequence}", f"cp.degree={degree}", *LONG]
    config = load("experiments/configs/tiny.yaml", words)

    def body(place, device):
        trainer = Trainer(config, Mesh.from_config(config, place.world, place.rank), device)
        batches = global_batches(config, open_tokens(config.data))
        return peak_bytes(trainer, batches.microbatches_of(0))

    peaks = start(body, total_ranks(config), config.launch)
    return max(p["activations"] + p["communication"] for p in peaks)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_step_of_128k_tokens(tmp_path, sequence=2**17):
    """One layer, two heads; twice the ranks, half the bytes."""
    path = tmp_path / "text.txt"
    path.write_text("a long text\n" * (sequence // 8), encoding="utf-8")
    two, four, eight = (step_bytes(path, tmp_path, sequence, degree) for degree in (2, 4, 8))
    print([peak / 2**20 for peak in (two, four, eight)])
    assert four <= 0.52 * two and eight <= 0.52 * four
    assert two < sequence * sequence // 100
