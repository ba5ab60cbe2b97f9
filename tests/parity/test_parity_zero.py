"""ZeRO against one process, by every gradient in float64; and that planted faults are caught."""

import pytest

from research import comm
from research.mesh import Layout, Mesh
from research.parallel.dp.gather import Unit
from research.parallel.dp.shards import Cut, Sharded
from research.parallel.dp.zero import Zero
from research.train.storage import Storage
from tests.parity.findings import assert_equal, fails

SMALL = "model.layers=2 data.sequence=16"
# Nothing divides by 2, 3 or 4: a bias of 26, vectors of 35, a vocabulary of 257; with tp2 odd parts of it.
UNEVEN = f"{SMALL} model.dim=35 model.vocab=257 model.ffn=51 model.expert_ffn=11 model.experts=7 model.head_dim=6"
IDLE = "model.layers=2 data.sequence=8 model.experts=32 model.top_k=1 train.global_batch=4"  # more experts than choices
GRID = [
    f"dp.zero=1 dp.degree=2 {SMALL}",
    f"dp.zero=2 dp.degree=2 {SMALL}",
    f"dp.zero=3 dp.degree=4 {SMALL}",
    f"dp.zero=3 dp.degree=4 dp.replicas=2 dp.keep_gathered=true {SMALL}",
    f"dp.zero=2 dp.degree=4 dp.replicas=2 train.microbatches=4 {SMALL}",
    f"dp.zero=1 dp.degree=2 tp.degree=2 {SMALL}",
    f"dp.zero=3 dp.degree=2 tp.degree=2 tp.sequence=false {SMALL}",
    f"dp.zero=2 dp.degree=2 ep.degree=2 {SMALL}",
    f"dp.zero=1 dp.degree=2 cp.degree=2 {SMALL} model.heads=4",
    f"dp.zero=2 dp.degree=2 cp.degree=2 cp.method=ulysses {SMALL} train.microbatches=4",
    f"dp.zero=3 tp.degree=2 ep.degree=4 dp.degree=2 {SMALL}",
    f"dp.zero=2 dp.degree=3 train.bucket_mib=0.01 {UNEVEN}",
    f"dp.zero=3 dp.degree=4 model.qkv_bias=true {UNEVEN}",
    f"dp.zero=2 dp.degree=2 train.bucket_mib=0.001 {IDLE}",
    f"dp.zero=3 dp.degree=2 {IDLE} train.recompute=full",
    f"dp.zero=3 dp.degree=2 {SMALL} model.tied=true model.mtp_depth=2 train.recompute=full",
    f"dp.zero=3 dp.degree=2 {SMALL} model.mtp_depth=2 train.recompute=selective",
    f"dp.zero=3 dp.degree=2 {SMALL} model.norm=post train.recompute=selective",
]
STAGES = ["dp.zero=0", "dp.zero=1", "dp.zero=2", "dp.zero=3", "dp.zero=3 dp.keep_gathered=true"]
LAYOUTS = [
    "dp.degree=2",
    "dp.degree=4 train.microbatches=4",
    "tp.degree=2 dp.degree=2",
    "tp.degree=2 dp.degree=4 dp.replicas=2 tp.sequence=false",
    "tp.degree=4 dp.degree=2 model.vocab=257",  # 65 rows, of which the last rank pads three
    "dp.degree=2 ep.degree=2",
    "dp.degree=4 ep.degree=2 train.bucket_mib=0.01",
    "tp.degree=2 ep.degree=4 dp.degree=2",
    "tp.degree=2 ep.degree=4 dp.degree=4 dp.replicas=2",
    "dp.degree=4 ep.degree=2 ep.tensor=2 train.recompute=full",
    "dp.degree=4 dp.replicas=2",
    "dp.degree=4 dp.replicas=4",
    "dp.degree=4 dp.replicas=2 train.recompute=full train.bucket_mib=0.001",
    "dp.degree=3 train.recompute=full train.bucket_mib=0",
    f"dp.degree=3 model.qkv_bias=true {UNEVEN}",
    f"dp.degree=2 {IDLE} train.bucket_mib=0.001",
    "dp.degree=4 train.global_batch=14 train.microbatches=3",
    "dp.degree=2 model.tied=true model.mtp_depth=2 model.layers=2",
    "dp.degree=3 model.mtp_depth=3 model.layers=2 train.recompute=full model.bias_rate=0.05",
    "dp.degree=2 model.attention=mla model.rotary_dim=4 model.q_latent=24 train.recompute=full",
    "dp.degree=2 model.capacity=0.7 model.drop_by=score train.deterministic=true",
    "dp.degree=1 dp.replicas=1",
]


@pytest.mark.parametrize("words", GRID)
def test_layout_equals_one_process(prove, words):
    assert_equal(prove("train.steps=5", *words.split()))


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_stage_in_every_layout(prove, stage, layout):
    if stage == "dp.zero=0" and "dp.replicas" in layout:
        pytest.skip("nothing to replicate")
    assert_equal(prove("train.steps=5", *stage.split(), *layout.split()))


@pytest.mark.parametrize("stage, together", [(0, 99), (2, 99), (3, 1)])
def test_order_does_not_depend_on_arrival(prove, monkeypatch, stage, together):
    """On one rank gradients arrive the other way round: those of a whole microbatch, or of each of its units, whose
    order is that of the graph."""
    on_gradient, end = Storage._on_gradient, Storage.end_backward
    waiting = []

    def late(self, parameter):
        if self.built.mesh.rank != 1:
            return on_gradient(self, parameter)
        waiting.append(parameter)
        bucket = self._bucket_of[parameter][1]
        if len(waiting) == together * len(bucket.held):
            deliver(self)

    def deliver(self):
        while waiting:
            on_gradient(self, waiting.pop())

    def ended(self, stage, last):
        deliver(self)
        end(self, stage, last)

    monkeypatch.setattr(Storage, "_on_gradient", late)
    monkeypatch.setattr(Storage, "end_backward", ended)
    assert_equal(prove("dp.degree=3", f"dp.zero={stage}", "train.bucket_mib=0.01", *SMALL.split()))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_planted_bucket_reduced_before_its_last_gradient(prove, monkeypatch, stage):
    def hasty(self, stage, last, real=Zero.begin_backward):
        real(self, stage, last)
        for bucket in self.buckets:
            bucket.missing -= 1

    def at_once(x, group, purpose, real=comm.start_reduce_scatter):
        pending = real(x, group, purpose)
        pending.wait()  # else the late gradient may still slip in before the collective reads the buffer
        return pending

    def dropped(self, name, grad, real=Sharded.add):
        if self.reduced == 0 or self.passing:
            real(self, name, grad)

    monkeypatch.setattr(Zero, "begin_backward", hasty)
    monkeypatch.setattr(Sharded, "add", dropped)
    monkeypatch.setattr(comm, "start_reduce_scatter", at_once)
    assert fails(prove("dp.degree=2", f"dp.zero={stage}", *SMALL.split()), "gradient")


def dense_for_experts(monkeypatch, name):
    """The groups of experts are those of all ranks, as if every rank held the same experts."""
    real, dense = getattr(Mesh, name), Layout(("dim",), (1,), (1,), (None,))

    def wrong(self, layout, *rest):
        return real(self, dense if "expert" in layout.dims else layout, *rest)

    monkeypatch.setattr(Mesh, name, wrong)


def test_planted_experts_summed_over_the_wrong_group(prove, monkeypatch):
    dense_for_experts(monkeypatch, "replicas")
    assert fails(prove("dp.degree=4", "ep.degree=2", *SMALL.split()), "gradient")


@pytest.mark.parametrize("stage", [1, 3])
def test_planted_experts_cut_over_the_wrong_group(prove, monkeypatch, stage):
    """Four ranks cut what two of them hold: half of it is nowhere."""
    dense_for_experts(monkeypatch, "shards")
    with pytest.raises(AssertionError, match=r"layers.1.ffn.w_down: boxes hold 8192 of 16384 elements"):
        prove("dp.degree=4", "ep.degree=2", f"dp.zero={stage}", *SMALL.split())


def test_planted_weights_of_the_step_before(prove, monkeypatch):
    """Kept parameters that nobody frees: the second step computes with the weights of the first."""
    monkeypatch.setattr(Unit, "free", lambda self: setattr(self, "awaited", 0))
    findings = prove("dp.degree=2", "dp.zero=3", *SMALL.split())
    assert not any(f.what == "gradient" and "step 0" in f.name and not f.passed for f in findings)
    assert fails(findings, "gradient") and fails(findings, "loss")


def test_planted_copies_of_a_shard_that_are_not_summed(prove, monkeypatch):
    def alone(self, real=Sharded.arrive):
        self.last = False
        real(self)

    monkeypatch.setattr(Sharded, "arrive", alone)
    assert fails(prove("dp.degree=4", "dp.replicas=2", "dp.zero=2", *SMALL.split()), "gradient")


def test_planted_copies_counted_in_the_norm(prove, monkeypatch):
    monkeypatch.setattr(Mesh, "shard_copies", lambda self, layout, parts: self.group("tp"))
    findings = prove("dp.degree=4", "dp.replicas=2", "dp.zero=3", *SMALL.split())
    assert fails(findings, "gradient norm")


def test_planted_shards_swapped(prove, monkeypatch):
    """Every rank tells the box of its neighbour."""
    real = Cut.box
    monkeypatch.setattr(Cut, "box", lambda self, whole, rank: real(self, whole, (rank + 1) % self.n))
    assert fails(prove("dp.degree=2", "dp.zero=1", *SMALL.split()), "gradient")
