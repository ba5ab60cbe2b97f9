"""Expert parallelism against one process, by every gradient in float64; and that planted faults are caught."""

import pytest
import torch

from research import comm
from research.models import moe
from research.models.products import Products
from research.parallel.ep import dispatch
from tests.parity.findings import assert_equal, fails

GRID = [
    "dp.degree=2 ep.degree=2",
    "dp.degree=2 ep.degree=2 ep.dispatch=all_gather train.recompute=full",
    "dp.degree=4 ep.degree=2 model.router_score=sigmoid model.bias_rate=0.05 train.recompute=full",
    "dp.degree=2 tp.degree=2 ep.degree=4 model.expert_groups=4 model.top_groups=2 model.group_best=2 ep.overlap=3",
    "dp.degree=2 tp.degree=2 ep.degree=2 ep.tensor=2 tp.sequence=false train.recompute=full ep.overlap=2",
    "tp.degree=4 ep.degree=2 ep.tensor=2 ep.dispatch=all_gather ep.overlap=3 train.deterministic=true",
    "tp.degree=4 tp.sequence=false ep.degree=4 model.balance_scope=sequence train.deterministic=true",
    "dp.degree=2 ep.tensor=2 model.top_k=1 model.shared_experts=0 model.normalize_weights=false",
    "dp.degree=2 tp.degree=4 ep.degree=8 model.weight_scale=1.5 train.microbatches=3",
    "dp.degree=3 ep.degree=3 model.experts=9 train.global_batch=14 train.microbatches=3 ep.dispatch=all_gather",
    "dp.degree=2 ep.degree=2 model.capacity=0.6 model.drop_by=score train.recompute=full ep.overlap=2",
    "dp.degree=2 tp.degree=2 ep.degree=2 ep.tensor=2 model.capacity=1 model.bias_rate=0.05 ep.dispatch=all_gather",
    "dp.degree=2 ep.degree=2 model.load=worst model.top_k=1 ep.overlap=2 train.deterministic=true",
    "tp.degree=2 ep.degree=2 model.load=skewed model.bias_rate=0.05 ep.dispatch=all_gather train.recompute=full",
    "dp.degree=2 ep.degree=2 model.mtp_depth=1 model.layers=2 model.norm=post train.recompute=full",
]


@pytest.mark.parametrize("words", GRID)
def test_layout_equals_one_process(prove, words):
    assert_equal(prove(*words.split()))


LAYOUTS = [
    "dp.degree=8 ep.degree=8",
    "dp.degree=4 tp.degree=2 ep.degree=8",
    "dp.degree=2 tp.degree=4 ep.degree=4 ep.tensor=2",
    "dp.degree=4 tp.degree=2 tp.sequence=false ep.degree=2 ep.tensor=2",
    "tp.degree=4 tp.sequence=false ep.degree=2 ep.tensor=2",
    "tp.degree=8 model.kv_heads=1 ep.degree=8",
]
ROUTERS = [
    "",
    "model.router_score=sigmoid model.bias_rate=0.05 model.balance_scope=sequence",
    "model.expert_groups=4 model.top_groups=2 model.group_best=2 model.normalize_weights=false model.capacity=0.8",
]
WAYS = ["ep.dispatch=all_to_all ep.overlap=2", "ep.dispatch=all_gather train.recompute=full"]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_with_every_router(prove, layout, router, way):
    assert_equal(prove(*layout.split(), *router.split(), *way.split()))


FORCED = {
    "the last rank is idle": lambda ids: ids % 4,
    "the first rank is idle": lambda ids: ids % 4 + 4,
    "one token in 64 is sent away": lambda ids: ids.where(torch.arange(len(ids))[:, None] % 64 == 3, ids % 4),
}


@pytest.mark.parametrize("dispatch", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("load", FORCED)
def test_forced_loads(prove, monkeypatch, load, dispatch):
    """Experts without a token get gradients of 0, which AdamW takes like those of one process, weight decay and all."""
    real, seed = moe.choose, 100 + list(FORCED).index(load)  # references are kept by config
    monkeypatch.setattr(moe, "choose", lambda scores, c: FORCED[load](real(scores, c)))
    words = ["dp.degree=2", "ep.degree=2", f"ep.dispatch={dispatch}", "model.top_k=1", f"train.seed={seed}"]
    assert_equal(prove(*words, "train.deterministic=true", "train.weight_decay=1", "train.steps=3"))


def test_planted_expert_gradient_divided_by_ep(prove, monkeypatch):
    """Of experts that are shared, as an average over the ranks that tokens come from would."""
    real = Products.grouped

    def divided(self, rows, w, counts):
        share = len(w) / 8
        return real(self, rows, w * share + (w * (1 - share)).detach(), counts)

    monkeypatch.setattr(Products, "grouped", divided)
    findings = prove("dp.degree=2", "ep.degree=2")
    wrong = [f.name for f in findings if f.what == "gradient" and f.name.endswith("(step 0)") and not f.passed]
    assert len(wrong) == 9 and all(".ffn.w_" in name for name in wrong)


def test_planted_rows_not_regrouped_by_expert(prove, monkeypatch):
    """What came from the first rank's tokens passes the first experts."""
    monkeypatch.setattr(dispatch, "regrouped", lambda counts, total: (torch.arange(total), torch.arange(total)))
    assert fails(prove("dp.degree=2", "ep.degree=2"), "loss")


def test_planted_rows_sent_back_as_they_stand(prove, monkeypatch):
    """Regrouped on arrival, not before they leave."""
    real = dispatch.AllToAll.answer

    def answer(self, coming, routed):
        def regrouped(*args):
            return dispatch.spread(routed(*args), self.order, self.places)

        return real(self, coming, regrouped)

    monkeypatch.setattr(dispatch.AllToAll, "answer", answer)
    assert fails(prove("dp.degree=2", "ep.degree=2"), "loss")


def test_planted_parts_of_an_expert_that_do_not_add_up(prove, monkeypatch):
    """A token goes to the first part of its experts alone."""
    real = dispatch._of_parts

    def first_alone(ids, n_experts, each, parts):
        every = real(ids, n_experts, each, parts).unflatten(1, (-1, parts))
        every[..., 1:] = n_experts * parts
        return every.flatten(1)

    monkeypatch.setattr(dispatch, "_of_parts", first_alone)
    assert fails(prove("dp.degree=2", "ep.tensor=2"), "loss")


@pytest.mark.parametrize("way", ["all_to_all", "all_gather"])
def test_planted_router_without_the_gradient_of_experts(prove, monkeypatch, way):
    """Routing weights travel, their gradient does not come back: the loss of the first step is right."""
    real = comm.Begun.wait

    def wait(self):
        y = real(self)
        rows, weights = y[..., :64], y[..., 64:]  # none on the way back
        return torch.cat([rows, weights.detach()], -1)

    monkeypatch.setattr(comm.Begun, "wait", wait)
    findings = prove("dp.degree=2", "ep.degree=2", f"ep.dispatch={way}")
    assert next(f for f in findings if f.what == "loss" and f.name == "step 0").passed
    assert any(f.name.startswith("layers.3.ffn.router") and not f.passed for f in findings)


def test_planted_token_filled_up_that_chooses(prove, monkeypatch):
    """Tokens that fill a rank up to the others choose the first expert."""
    real = dispatch._filled
    monkeypatch.setattr(dispatch, "_filled", lambda t, tokens, value=0: real(t, tokens))
    words = ["dp.degree=3", "ep.degree=3", "model.experts=9", "ep.dispatch=all_gather"]
    with pytest.raises(Exception, match="rank"):
        prove(*words, "train.global_batch=14", "train.microbatches=3")
