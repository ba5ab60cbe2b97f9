"""Data parallelism against one process, by every gradient in float64; and that planted faults are caught."""

import dataclasses
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

from research import build, comm
from research.models import products, seams
from research.train import loop
from research.train.executor import Denominators
from research.train.proof import Snapshot, compare
from research.train.storage import Storage
from tests.parity.findings import assert_equal, fails

GRID = [
    "dp.degree=2",
    "dp.degree=3",
    "dp.degree=4",
    "dp.degree=4 train.microbatches=1",
    "dp.degree=4 train.microbatches=4",
    "dp.degree=4 train.global_batch=14 train.microbatches=3",  # microbatches of 5, 5, 4; ranks of 2, 1, 1, 1
    "dp.degree=2 train.bucket_mib=0.001",
    "dp.degree=2 train.bucket_mib=0",
    "dp.degree=2 train.recompute=full",
    "dp.degree=2 train.deterministic=true",
    "dp.degree=2 train.clip=0",
    "dp.degree=2 train.clip=0.01 train.schedule=wsd",
    "dp.degree=2 model.tied=true",
    "dp.degree=2 model.experts=0",
    "dp.degree=2 model.dense_layers=0 model.shared_experts=0 model.normalize_weights=false",
    "dp.degree=2 model.top_k=1 model.kv_heads=1",
    "dp.degree=2 model.kv_heads=8 model.experts=32 model.top_k=4",  # more experts than some rank has tokens for
    "dp.degree=2 model.qk_norm=head model.window=7 model.window_from=2 model.rotary_dim=4",
    "dp.degree=2 model.qkv_bias=true model.out_bias=true model.mlp_bias=true",
    "dp.degree=2 model.rope_scaling=yarn model.rope_factor=4 model.rope_context=32 model.rope_mscale_all=0.7",
    "dp.degree=2 model.qk_norm=all model.moe_every=2 model.weight_scale=1.5 model.balance_scope=sequence",
    "dp.degree=3 model.router_score=sigmoid model.balance_scope=sequence model.bias_rate=0.05",
    "dp.degree=2 model.expert_groups=4 model.top_groups=2 model.group_best=2 model.bias_rate=0.05 train.recompute=full",
    "dp.degree=2 model.attention=mla model.rotary_dim=4 model.value_dim=12 model.q_latent=24 train.recompute=full",
    "dp.degree=2 model.attention=mla model.rotary_dim=2 model.window=9",
    "dp.degree=2 model.capacity=1 model.bias_rate=0.05",
    "dp.degree=3 model.capacity=0.6 model.drop_by=score train.recompute=full",
    "dp.degree=2 model.norm=post",
    "dp.degree=2 model.norm=output",
    "dp.degree=2 model.norm=sandwich",
    "dp.degree=2 model.document_mask=true model.window=20 data.path=experiments/configs",  # short documents
    "dp.degree=3 model.mtp_depth=2 model.layers=2 model.bias_rate=0.05 train.recompute=full",
    "dp.degree=2 model.mtp_depth=1 model.tied=true model.balance_scope=sequence train.microbatches=3",
    "dp.degree=2 model.mtp_depth=3 model.layers=2 model.document_mask=true data.path=experiments/configs",
    "dp.degree=2 model.mtp_depth=2 model.layers=2 model.capacity=0.6",
    "dp.degree=1 train.recompute=full train.bucket_mib=0.01",
]


@pytest.mark.parametrize("words", GRID)
def test_layout_equals_one_process(prove, words):
    assert_equal(prove(*words.split()))


class PutOff(torch.autograd.Function):
    """A product whose weight gradient is left for later, as a schedule that parts B from W does."""

    waiting: ClassVar = []

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return F.linear(x, w)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        PutOff.waiting.append((w, dy.flatten(0, -2).T @ x.flatten(0, -2)))
        return dy @ w, None


@pytest.mark.parametrize("mib", [0, 0.01, 16])
def test_gradients_put_off_to_w(prove, monkeypatch, mib):
    """Autograd reaches those parameters in B without a gradient: that completes no bucket."""

    def w(self, stage, last, real=Storage.end_backward):
        while PutOff.waiting:
            self.accumulate(*PutOff.waiting.pop())
        real(self, stage, last)

    monkeypatch.setattr(products.Products, "linear", lambda self, x, weight: PutOff.apply(x, weight))
    monkeypatch.setattr(Storage, "end_backward", w)
    assert_equal(prove("dp.degree=2", f"train.bucket_mib={mib}"))


def test_planted_average_instead_of_sum(prove, monkeypatch):
    """Invisible in the first loss; AdamW alone would hide it in the weights."""

    def averaged(x, group, purpose, op=comm.SUM, real=comm.start_all_reduce):
        return real(x.div_(group.size) if purpose == "gradients" else x, group, purpose, op)

    monkeypatch.setattr(comm, "start_all_reduce", averaged)
    assert fails(prove("dp.degree=2"), "gradient")


def test_planted_mean_of_means(prove, monkeypatch):
    """A mean over each rank's own tokens, then over ranks."""

    def local(actions, built, batch, weigh, storage, real=loop.execute):
        own = sum(int((batch(m).targets >= 0).sum()) for m in range(len(weigh.tokens)))
        return real(actions, built, batch, Denominators(own * built.mesh.sizes["dp"], weigh.tokens), storage)

    monkeypatch.setattr(loop, "execute", local)
    assert fails(prove("dp.degree=2"), "loss") and fails(prove("dp.degree=2"), "gradient")


def test_planted_mean_of_means_at_a_depth(prove, monkeypatch):
    def local(actions, built, batch, weigh, storage, real=loop.execute):
        own = [sum(int((batch(m).ahead[k].targets >= 0).sum()) for m in range(len(weigh.tokens))) for k in range(2)]
        ahead = [n * built.mesh.sizes["dp"] for n in own]
        return real(actions, built, batch, dataclasses.replace(weigh, ahead=ahead), storage)

    monkeypatch.setattr(loop, "execute", local)
    findings = prove("dp.degree=2", "model.mtp_depth=2", "model.layers=2")
    assert {f.name for f in findings if f.what == "loss" and not f.passed} >= {"step 0, depth 1", "step 0, depth 2"}
    assert fails(findings, "gradient") and next(f for f in findings if f.name == "step 0" and f.what == "loss").passed


def test_planted_local_expert_counts(prove, monkeypatch):
    """The balance loss of each rank's own tokens: the loss stays right, the routers do not."""
    monkeypatch.setattr(build, "summed", lambda counting, group: lambda ids, n: counting(ids, n) * 2)
    findings = prove("dp.degree=2")
    assert fails(findings, "gradient")
    assert next(f for f in findings if f.what == "loss" and f.name == "step 0").passed


def test_planted_ranks_drop_by_themselves(prove, monkeypatch):
    """Each rank fills the experts with its own tokens."""

    def alone(group):
        return lambda values, numbers, whole: seams.assemble(values, numbers, whole).clamp(min=0)

    monkeypatch.setattr(build, "assembled", alone)
    assert fails(prove("dp.degree=2", "model.capacity=1"), "gradient")


def test_planted_bucket_reduced_before_its_last_gradient(prove, monkeypatch):
    def hasty(self, stage, last):
        self._completing_stage, self._last_backward = stage if last else None, last
        for bucket in self.buckets:
            bucket.missing = len(bucket.held) - 1

    def at_once(x, group, purpose, op=comm.SUM, real=comm.start_all_reduce):
        pending = real(x, group, purpose, op)
        pending.wait()  # else the late gradient may still slip in before the collective reads the buffer
        return pending

    monkeypatch.setattr(Storage, "begin_backward", hasty)
    monkeypatch.setattr(comm, "start_all_reduce", at_once)
    assert fails(prove("dp.degree=2"), "gradient")


def test_planted_rank_keeps_its_own_gradient(prove, monkeypatch):
    """One copy of one box differs on one rank."""
    real = Storage.gradients

    def skewed(self):
        for name, box, grad in real(self):
            if name == "head.norm.weight" and self.built.mesh.rank == 1:
                grad = grad * (1 + 1e-6)
            yield name, box, grad

    monkeypatch.setattr(Storage, "gradients", skewed)
    assert fails(prove("dp.degree=2"), "gradient")


def test_planted_norm_of_one_rank(prove, monkeypatch):
    def counts_copies(self):
        square = sum(b.flat.square().sum() for b in self.buckets)
        return comm.all_reduce_(square, self.built.mesh.group("world"), "gradient norm").sqrt()

    monkeypatch.setattr(Storage, "norm", counts_copies)
    assert fails(prove("dp.degree=2"), "gradient norm")


def test_planted_nan_is_no_pass(prove, monkeypatch):
    """A comparison that NaN passes would prove nothing."""
    real = Storage.gradients

    def poisoned(self):
        for name, box, grad in real(self):
            yield name, box, torch.full_like(grad, torch.nan) if self.built.mesh.rank == 1 else grad

    monkeypatch.setattr(Storage, "gradients", poisoned)
    assert fails(prove("dp.degree=2"), "gradient")


@pytest.mark.parametrize("got", [0.0, 1e-100, torch.nan])
def test_where_all_is_zero_only_zeros_are_equal(got):
    """As with model.init_std=0."""

    def snapshot(gradient: float) -> Snapshot:
        box, gradients = ((0, 2),), torch.full((2,), gradient, dtype=torch.float64)
        return Snapshot([(1.0, 0.0, 0.0)], [{"w": (box, gradients)}], {"w": (box, torch.ones(2))})

    findings = compare(snapshot(0.0), [snapshot(got)])
    assert fails(findings, "gradient") == (got != 0) and not fails(findings, "weight")
