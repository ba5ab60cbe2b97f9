"""Tensor parallelism against one process, by every gradient in float64; and that planted faults are caught."""

import pytest
import torch

from research import comm
from research.data.tokens import open_tokens
from research.launch.local import start
from research.mesh import Mesh, total_ranks
from research.models import kernels, recipes
from research.parallel import tp
from research.parallel.tp import products
from research.settings import load
from research.train.loop import Trainer
from research.train.run import global_batches
from tests.parity.findings import assert_equal, fails

MLA = "model.attention=mla model.rotary_dim=4 model.value_dim=12"
GRID = [
    "tp.degree=2",
    "tp.degree=2 tp.sequence=false",
    "tp.degree=4",  # two ranks with a copy of each kv head
    "tp.degree=4 tp.sequence=false",
    "tp.degree=8 model.kv_heads=1",
    "tp.degree=2 dp.degree=2",
    "tp.degree=2 dp.degree=2 tp.sequence=false train.bucket_mib=0.01",
    "tp.degree=2 dp.degree=3 tp.sequence=false",  # uneven rows
    "tp.degree=2 tp.keep_gathered=true tp.overlap=3",
    "tp.degree=2 tp.overlap=5 train.recompute=full",
    "tp.degree=4 tp.overlap=3 tp.sequence=false train.recompute=full",
    "tp.degree=2 model.experts=0 model.kv_heads=8",
    "tp.degree=2 tp.overlap=2 train.recompute=selective model.qk_norm=head",
    "tp.degree=2 dp.degree=2 dp.zero=3 model.ffn=50 model.vocab=247 model.qkv_bias=true train.recompute=selective",
    "tp.degree=2 pp.degree=2 pp.schedule=zb_h1 train.microbatches=4 train.recompute=selective",
    "tp.degree=4 tp.sequence=false train.recompute=selective model.norm=sandwich",
    f"tp.degree=2 tp.keep_gathered=true train.recompute=selective {MLA} model.q_latent=24 model.mtp_depth=1",
    "tp.degree=4 model.vocab=257 model.tied=true",  # 65 rows each, three of them padding
    "tp.degree=4 model.vocab=257 tp.sequence=false train.deterministic=true",
    "tp.degree=4 model.qk_norm=all",
    "tp.degree=4 model.qk_norm=all tp.sequence=false",
    "tp.degree=2 model.qk_norm=head model.window=7 model.rotary_dim=4",
    "tp.degree=2 model.qkv_bias=true model.out_bias=true model.mlp_bias=true",
    "tp.degree=4 model.qkv_bias=true model.out_bias=true model.mlp_bias=true tp.sequence=false",
    f"tp.degree=2 {MLA} model.q_latent=24 train.recompute=full",
    f"tp.degree=4 {MLA} model.q_latent=24 tp.sequence=false",
    f"tp.degree=2 {MLA} tp.keep_gathered=true",
    "tp.degree=2 model.norm=sandwich model.router_score=sigmoid model.bias_rate=0.05",
    "tp.degree=2 dp.degree=2 model.balance_scope=sequence model.dense_layers=0 tp.sequence=false",
    "tp.degree=4 model.balance_scope=sequence model.shared_experts=0 model.top_k=1",
    "tp.degree=2 model.capacity=1 model.bias_rate=0.05",
    "tp.degree=2 dp.degree=2 model.capacity=0.7 model.drop_by=score tp.sequence=false",
    "tp.degree=2 model.mtp_depth=2 tp.sequence=false",
    "tp.degree=2 model.mtp_depth=1 model.document_mask=true data.path=experiments/configs",
]


@pytest.mark.parametrize("words", GRID)
def test_layout_equals_one_process(prove, words):
    assert_equal(prove(*words.split()))


@pytest.mark.parametrize("words", ["tp.degree=1", "tp.degree=2", "tp.degree=4 tp.sequence=false model.vocab=261"])
@pytest.mark.parametrize("logits", [10**4, 10**5])
def test_cross_entropy_in_pieces(prove, monkeypatch, words, logits):
    """Of a microbatch's 512 tokens, some 40 or 400 (80 or 800) at a time."""
    monkeypatch.setattr(kernels, "CHUNK", logits)
    assert_equal(prove(*words.split()))


def weights_after_training(config, place, device):
    trainer = Trainer(config, Mesh.from_config(config, place.world, place.rank), device)
    batches = global_batches(config, open_tokens(config.data))
    for step in range(5):
        trainer.update(step, trainer.backward(batches.microbatches_of(step)))
    group = {name: trainer.built.replicas[name].ranks for name in trainer.built.replicas}
    return {name: (group[name], weight) for name, _, weight in trainer.storage.weights()}


@pytest.mark.parametrize("sequence", ["true", "false"])
def test_copies_are_bitwise_equal_after_five_steps(text, tmp_path, sequence):
    words = ["tp.degree=4", f"tp.sequence={sequence}", "model.qk_norm=head", "train.dtype=float32"]
    words += [f"data.path={text}", f"data.cache={tmp_path}", "model.router_score=sigmoid", "model.bias_rate=0.01"]
    config = load("experiments/configs/tiny.yaml", words)
    ranks = start(
        lambda place, device: weights_after_training(config, place, device), total_ranks(config), config.launch, 60.0
    )
    copied = 0
    for mine in ranks:
        for name, (holders, weight) in mine.items():
            copied += len(holders) - 1
            assert all(torch.equal(weight, ranks[r][name][1]) for r in holders), name
    assert copied > 100


def test_planted_norm_gradient_that_is_not_summed(prove, monkeypatch):
    """Each rank keeps what its own tokens say of a norm."""

    def alone(self, layout, real=Mesh.replicas):
        return self.group("dp") if layout.dims == ("dim",) else real(self, layout)

    monkeypatch.setattr(Mesh, "replicas", alone)
    assert fails(prove("tp.degree=2"), "gradient")


def test_planted_vocabulary_offset(prove, monkeypatch):
    """The last rank's rows are taken for those one id further."""
    real = kernels.cross_entropy

    def shifted(x, head, targets, low=0, *rest):
        return real(x, head, targets, low + (low > 0), *rest)

    monkeypatch.setattr(kernels, "cross_entropy", shifted)
    assert fails(prove("tp.degree=2"), "loss")


def test_planted_loss_reported_by_every_rank(prove, monkeypatch):
    monkeypatch.setattr(tp._Unreported, "forward", staticmethod(lambda ctx, y: y.clone()))
    assert fails(prove("tp.degree=2"), "loss")


def test_planted_stream_gradient_taken_for_whole(prove, monkeypatch):
    """Without sequence parallelism each rank's gradient of the stream is a part: `row` must sum it."""
    real = comm.start_all_reduce

    def skipped(x, group, purpose, op=comm.SUM):
        whole = purpose == "row" and group.ledger.phase == "BW"
        return comm.Pending(group, x, None) if whole else real(x, group, purpose, op)

    monkeypatch.setattr(comm, "start_all_reduce", skipped)
    assert fails(prove("tp.degree=2", "tp.sequence=false"), "gradient")


def test_planted_padding_that_takes_part(prove, monkeypatch):
    """Rows beyond the vocabulary have logits of 0, which enter the softmax."""
    real = tp.cross_entropy
    monkeypatch.setattr(tp, "cross_entropy", lambda group, vocab, sequence: real(group, 10**6, sequence))
    assert fails(prove("tp.degree=4", "model.vocab=257"), "loss")


def test_planted_pieces_in_the_wrong_order(prove, monkeypatch):
    """Pieces hold a run of each rank's tokens: they are not put together end to end."""
    monkeypatch.setattr(products, "_whole", lambda parts, n: torch.cat(list(parts), 1))
    assert fails(prove("tp.degree=2", "tp.overlap=2"), "loss")


def test_planted_own_tokens_kept_for_all(prove, monkeypatch):
    """`keep_gathered` that keeps this rank's tokens, repeated, in place of those that were gathered."""
    real = products._gathered_product

    def forgetful(x, group, purpose, pieces, weights):
        gathered, outputs = real(x, group, purpose, pieces, weights)
        return (torch.cat([x] * group.size, 1) if purpose == "column" else gathered), outputs

    monkeypatch.setattr(products, "_gathered_product", forgetful)
    findings = prove("tp.degree=2", "tp.keep_gathered=true")
    assert fails(findings, "gradient") and next(f for f in findings if f.what == "loss" and f.name == "step 0").passed


def test_planted_recipe_that_is_a_little_off(prove, monkeypatch):
    """Selective recompute: what is made again a little too large is right in forward."""
    real = recipes.Recipe.__call__
    monkeypatch.setattr(recipes.Recipe, "__call__", lambda self: real(self) * (1 + 1e-6))
    findings = prove("tp.degree=2", "train.recompute=selective")
    assert fails(findings, "gradient") and next(f for f in findings if f.what == "loss" and f.name == "step 0").passed
