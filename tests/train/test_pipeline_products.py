"""Input-gradient and weight-gradient passes are truly split: what they compute and exchange, counted."""

import pytest
from torch.utils.flop_counter import FlopCounterMode

from research import comm
from research.models.products import Products
from research.parallel.tp.products import _Column
from research.train import executor
from tests.train.first_step import on_ranks


def flops(trainer, microbatches):
    with FlopCounterMode(display=False) as counter:
        trainer.backward(microbatches)
    return counter.get_total_flops()


def flops_of(layout, words, name):
    """Of all ranks, split into two passes and not."""
    split = layout("pp.degree=2", f"pp.schedule={name}", *words.split())
    return sum(on_ranks(split, flops)), sum(on_ranks(layout(*words.split()), flops))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("zb_h1", ""),
        ("zbv", "tp.degree=2"),
        ("zb_h2", "tp.degree=2 tp.sequence=false"),
        ("interleaved_zb", "dp.degree=2 ep.degree=2 train.recompute=full"),
    ],
)
def test_no_product_is_computed_twice(layout, name, words):
    """Those of experts among them, which float64 computes one by one."""
    split, whole = flops_of(layout, words, name)
    assert split == whole > 0


@pytest.mark.parametrize("dims", [2, 3], ids=["linear", "experts"])
def test_planted_weight_gradients_in_both_passes(layout, monkeypatch, dims):
    real = Products.gradients

    def twice(self, weights, compute):
        if self.puts_off and weights[0].dim() == dims:
            compute()
        return real(self, weights, compute)

    monkeypatch.setattr(Products, "gradients", twice)
    split, whole = flops_of(layout, "", "zb_h1")
    assert split > whole


def test_the_input_gradient_alone_makes_no_weight_gradient(layout, monkeypatch):
    """Of a stage without embedding's and head's products, which stay in B: each pass computes as much as the others."""
    found = {}
    real = executor._Walk.run

    def counted(self, action):
        with FlopCounterMode(display=False) as counter:
            real(self, action)
        found[action.kind] = found.get(action.kind, 0) + counter.get_total_flops()

    monkeypatch.setattr(executor._Walk, "run", counted)
    words = ["model.experts=0", "pp.degree=4", "pp.schedule=zb_h1"]
    first, middle, *_ = on_ranks(layout(*words), lambda trainer, batches: trainer.backward(batches) and dict(found))
    assert middle["F"] == middle["B"] == middle["W"] > 0
    assert first["BW"] == 2 * first["F"] == 2 * middle["F"] and set(first) == {"F", "BW"}


def column_gathers(layout):
    """Bytes of the all-gathers of `column`, by phase, on a rank of the last stage."""

    def body(trainer, batches):
        trainer.backward(batches)
        counted = trainer.mesh.ledger.bytes.items()
        return {at.phase: n for at, n in counted if (at.purpose, at.op) == ("column", "all_gather")}

    return on_ranks(layout("pp.degree=2", "tp.degree=2", "pp.schedule=zb_h1"), body)[-1]


def test_inputs_are_gathered_again_where_the_weight_gradient_needs_them(layout):
    found = column_gathers(layout)
    assert found == dict.fromkeys(("F", "W"), found["F"])


def test_planted_gather_that_the_input_gradient_starts(layout, monkeypatch):
    """Gathered inputs would live from B to W."""
    real = _Column.backward

    def early(ctx, *dys):
        comm.start_all_gather(ctx.saved_tensors[0], ctx.about[0], "column").wait()
        return real(ctx, *dys)

    monkeypatch.setattr(_Column, "backward", staticmethod(early))
    assert "B" in column_gathers(layout)
