"""What a row says of speed, work and memory, against closed formulas and planted delays."""

import json
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from research.config import replace
from research.data.tokens import open_tokens
from research.launch.local import start
from research.launch.process import Place
from research.mesh import Mesh, total_ranks
from research.models.flops import counter, flops_per_token
from research.models.moe import MoE
from research.settings import load
from research.train import loop
from research.train.memory import MemoryMeter, peak_bytes
from research.train.run import global_batches, run

CPU = torch.device("cpu")
LIMIT_S = 60.0


@pytest.fixture
def config(text, tmp_path):
    words = [f"data.path={text}", f"data.cache={tmp_path}/cache", f"record.folder={tmp_path}", "train.steps=4"]
    return load("experiments/configs/tiny.yaml", [*words, "train.warmup_steps=2", "train.dtype=float32"])


def trainer_of(config):
    batches = global_batches(config, open_tokens(config.data)).microbatches_of
    return loop.Trainer(config, Mesh({}), CPU), batches


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model.experts": 0, "model.kv_heads": 8},
        {"model.tied": True, "model.top_k": 3, "model.shared_experts": 0},
        {"train.recompute": "full"},
        {"train.dtype": "bfloat16"},
        {"model.attention": "mla", "model.rotary_dim": 4, "model.q_latent": 24, "model.value_dim": 12},
        {"model.window": 10, "model.qk_norm": "head", "model.qkv_bias": True, "model.mlp_bias": True},
        {"model.mtp_depth": 2},
        {"model.mtp_depth": 1, "model.tied": True, "model.experts": 0, "train.dtype": "bfloat16"},
    ],
)
def test_flops_equal_what_torch_counts(config, changes):
    config = replace(config, changes)
    trainer, batches = trainer_of(config)
    with counter() as counted:
        trainer.backward(batches(0))
    tokens = config.train.global_batch * config.data.sequence
    want = tokens * flops_per_token(config.model, trainer.built.specs, config.data.sequence, causal=False)
    if config.train.recompute == "full":
        assert want < counted.get_total_flops() < want * 4 / 3 + 1  # a second forward of all but embedding and head
    else:
        assert counted.get_total_flops() == want


def test_the_convention_is_named_and_switches_half_of_attention(config):
    trainer, _ = trainer_of(config)
    full, causal = (flops_per_token(config.model, trainer.built.specs, 64, c) for c in (False, True))
    assert full - causal == 6 * 4 * 8 * 8 * 64
    rows = [
        start(lambda p, d, c=c: run(replace(config, {"record.causal_flops": c}), p, d), 1, config.launch, LIMIT_S)[0]
        for c in (True, False)
    ]
    assert [r.flops_per_token for r in rows] == [causal, full]
    assert "causal" in rows[0].flops_convention and "full" in rows[1].flops_convention


def test_state_is_exact_and_activations_fall_with_recompute(config):
    """float32: weights, gradients, two moments of 4 bytes; bfloat16: weights 2, masters 4, gradients 4, moments 8."""
    peaks = {}
    for dtype in ("float32", "bfloat16"):
        for recompute in ("none", "selective", "full"):
            part = replace(config, {"train.dtype": dtype, "train.recompute": recompute})
            trainer, batches = trainer_of(part)
            trainer.update(0, trainer.backward(batches(0)))
            before = {n: w.clone() for n, _, w in trainer.storage.weights()}
            peaks[dtype, recompute] = peak_bytes(trainer, batches(1))
            assert all(torch.equal(w, before[n]) for n, _, w in trainer.storage.weights())
    numel = sum(p.numel() for p in trainer.built.model.parameters())
    routers = sum(s.numel for n, s in trainer.built.specs.items() if n.endswith("router"))
    tensors = len(trainer.built.specs)
    one = peaks["float32", "none"]
    assert (one["parameters"], one["gradients"], one["master"]) == (4 * numel, 4 * numel, 0)
    assert one["optimizer"] == 8 * numel + 4 * tensors  # and a step count each
    mixed = peaks["bfloat16", "none"]
    assert mixed["parameters"] == 2 * (numel - routers) + 4 * routers
    assert (mixed["master"], mixed["gradients"]) == (4 * (numel - routers), 4 * numel)
    for dtype in ("float32", "bfloat16"):
        none, selective, full = (peaks[dtype, kind]["activations"] for kind in ("none", "selective", "full"))
        assert full < 0.6 * none and full < selective < 0.75 * none


def test_the_meter_counts_storages_once_and_until_release(config):
    trainer, _ = trainer_of(config)
    a = torch.zeros(1000)
    with MemoryMeter({"parameters": [a, a[10:]]}, trainer.mesh.ledger) as meter:
        b = a + 1  # 4000
        view = b.view(10, 100)
        del b
        c = view * 2  # 4000, beside b which the view keeps
        del view, c
        trainer.mesh.ledger.allocates = "communication"
        d = a[:500] * 2  # 2000
        trainer.mesh.ledger.allocates = "activations"
    assert meter.peak == {"parameters": 4000, "activations": 8000}
    del d


def test_the_meter_agrees_with_the_bytes_that_autograd_saves(config):
    """At the end of a forward, what is alive beyond parameters is what backward will read, the counts of choices that
    the optimizer step will, where choices stand (index, places and starts: integers, no tensors of the graph), and the
    outputs."""
    trainer, batches = trainer_of(config)
    saved = {}

    def pack(t):
        saved[t.untyped_storage()._cdata] = t.untyped_storage()
        return t

    batch = batches(0)[0]
    known = trainer.storage.tensors() | {"batch": [batch.tokens, batch.targets, batch.positions, batch.documents]}
    with MemoryMeter(known, trainer.mesh.ledger) as meter:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = trainer.built.model(batch)
        live = dict(meter._live)
    state = {t.untyped_storage()._cdata for ts in known.values() for t in ts}
    saved_bytes = sum(s.nbytes() for key, s in saved.items() if key not in state)
    counts = [t for m in trainer.built.model.modules() if isinstance(m, MoE) for t in m.counted]
    standing = len(counts) * batch.tokens.numel() * (2 * config.model.top_k + 1) * 8
    unsaved = 64 + standing + sum(t.nbytes for t in (out.loss, out.aux, *counts))
    assert saved_bytes <= live["activations"] <= saved_bytes + unsaved


def test_slow_warm_up_stays_out(config, monkeypatch):
    """Step 1 takes a second, others 50 ms: the mean is of those."""
    real = loop.Trainer.queue

    def slow(self, index, sums):
        time.sleep(1.0 if index == 1 else 0.05)
        return real(self, index, sums)

    monkeypatch.setattr(loop.Trainer, "queue", slow)
    config = replace(config, {"train.steps": 8, "record.warmup_steps": 2, "model.layers": 1})
    row = start(lambda p, d: run(config, p, d), 1, config.launch, LIMIT_S)[0]
    assert 50 < row.step_ms < 500
    assert row.tokens_per_s == pytest.approx(16 * 64 / row.step_ms * 1e3, rel=0.5)
    assert row.tokens == 8 * 16 * 64


def test_every_rank_counts_a_token_once(config):
    """dp2: the same tokens, and the slower rank's time."""
    config = replace(config, {"dp.degree": 2, "record.peak_tflops": 0.5})

    def body(place, device):
        return run(config, place, device)

    rows = start(body, total_ranks(config), config.launch, LIMIT_S)
    assert rows[0].tokens == rows[1].tokens == 4 * 16 * 64
    row = rows[0]
    assert row.tflops_per_rank == pytest.approx(row.flops_per_token * row.tokens_per_s / 2 / 1e12)
    assert row.mfu == pytest.approx(row.tflops_per_rank / 0.5)
    assert len(row.rank_peak_bytes) == 2 and row.peak_bytes in row.rank_peak_bytes
    assert all(sum(p.values()) <= sum(row.peak_bytes.values()) for p in row.rank_peak_bytes)
    assert all(p["gradients"] == 4 * row.parameters for p in row.rank_peak_bytes)
    assert set(row.exposed_comm_ms) == {"dp", "stage", "world"}
    assert row.comm_bytes["dp"] == {"gradients/all_reduce/BW": 4 * row.parameters}, "the measured step is not counted"


def test_waiting_for_a_slow_rank_is_exposed(config, monkeypatch):
    real = loop.Trainer.backward

    def slow(self, microbatches):
        if self.mesh.rank == 1:
            time.sleep(0.2)
        return real(self, microbatches)

    monkeypatch.setattr(loop.Trainer, "backward", slow)
    config = replace(config, {"dp.degree": 2})
    row = start(lambda p, d: run(config, p, d), 2, config.launch, LIMIT_S)[0]
    assert 190 < sum(row.exposed_comm_ms.values()) < 600


def test_a_small_run_after_a_big_one_measures_itself(config):
    """One process measures both: no high-water mark is left over."""
    sides = []
    for layers in ("alone", "after"):
        if layers == "after":
            trainer, batches = trainer_of(replace(config, {"model.ffn": 1024}))
            big = peak_bytes(trainer, batches(0))
            del trainer
        trainer, batches = trainer_of(config)
        sides.append(peak_bytes(trainer, batches(0)))
    assert sides[0] == sides[1] and sum(sides[0].values()) < sum(big.values())


def test_tensorboard_and_trace(config, tmp_path):
    config = replace(config, {"record.tensorboard": True, "record.profile": True, "dp.degree": 2, "record.arm": "x"})
    row = start(lambda p, d: run(config, p, d), 2, config.launch, LIMIT_S)[0]
    board = EventAccumulator(str(tmp_path / "tensorboard" / row.run_id)).Reload()
    assert [e.value for e in board.Scalars("loss/cross_entropy")] == pytest.approx(row.losses, rel=1e-6)
    assert "optimizer/learning_rate" in board.Tags()["scalars"] and "final/loss" in board.Tags()["scalars"]
    trace = json.loads((tmp_path / "traces" / f"{row.run_id}.json").read_text())
    names = {e.get("name") for e in trace["traceEvents"]}
    assert {"forward 0", "forward 1", "backward 1", "optimizer", "dp: gradients", "stage: expert counts"} <= names
    assert "wait for dp" in names
    assert Place(0, 2, 0, 2).nodes == 1
