"""What notebooks show of the code itself: the mesh, one batch seam by seam, schedules, formulas, small pictures."""

import io
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from experiments.command import CHECKS
from research import settings
from research.mesh import Layout, Mesh
from research.parallel.cp.cost import traffic
from research.parallel.pp.generate import FAMILIES
from research.report import trace
from research.report.figures import COLOURS
from research.report.formulas import against, by_formula, config_of
from research.report.lines import loss_gap
from research.report.schedules import bubbles, comparison, timelines
from research.report.small import small
from research.report.tokens import BALANCES, holders, square, work
from research.report.topology import groups, holdings, members, picture, places

SIZES = {"pp": 2, "dp": 2, "cp": 2, "tp": 2, "ep": 4}
TINY = "experiments/configs/tiny.yaml"


@pytest.fixture
def load(text, tmp_path):
    return lambda *words: settings.load(TINY, [f"data.path={text}", f"data.cache={tmp_path}/cache", *words], CHECKS)


def test_places_are_the_coordinates_of_every_rank():
    table = places(SIZES)
    assert table.loc[13, "dense"].tolist() == [1, 1, 0, 1] and table.loc[13, "expert"].tolist() == [1, 1, 1, 0]
    assert len(table) == 16 and not table.duplicated().any()


def test_members_are_the_groups_of_the_mesh_and_cover_the_world_once():
    assert members(SIZES, "tp")[:2] == [(0, 1), (2, 3)] and members(SIZES, "pp")[0] == (0, 8)
    for axis in ("pp", "dp", "cp", "tp", "edp", "ep", "etp"):
        found = members(SIZES, axis)
        assert sorted(r for ranks in found for r in ranks) == list(range(16))
        assert {len(ranks) for ranks in found} == {Mesh(SIZES).sizes[axis]}


def test_the_table_of_groups_counts_all_and_names_those_of_stage_0():
    table = groups(SIZES)
    assert table.loc["ep"].tolist() == ["experts", 4, 4, "0 1 2 3 | 4 5 6 7"]
    assert table.loc["etp", "groups"] == 16


def test_holdings_tell_boxes_and_over_whom_gradients_are_summed():
    experts = Layout(("expert", "dim"), (8, 64), (1, 1), (("ep", 4), None))
    assert holdings(SIZES, experts).iloc[5].tolist() == ["2:4, 0:64", "1 5", "dp"]
    alone = holdings({"ep": 2, "tp": 2}, Layout(("expert",), (8,), (1,), (("ep", 2),)))
    assert alone.iloc[1].tolist() == ["4:8", "–", "–"]


def test_the_picture_gives_a_group_one_colour_and_none_to_who_is_alone():
    figure = picture(SIZES, ["ep", "etp", "tp", "dp"])
    ep, etp, *_ = (axes for axes in figure.axes if axes.patches)
    fills = [patch.get_facecolor() for patch in ep.patches]
    assert len(fills) == 16 and len(set(fills)) == 4 and len(set(fills[:4])) == 1
    assert {patch.get_facecolor()[:3] for patch in etp.patches} == {(1.0, 1.0, 1.0)}
    assert ep.get_title() == "ep = 4: experts"


def test_fields_tell_shapes_of_a_batch(load):
    table = trace.fields(trace.first_microbatch(load()))
    assert table.index.tolist() == ["tokens", "targets", "positions", "documents"]
    assert table["shape"].tolist() == [(8, 64)] * 4
    assert table.loc["positions", "first sample"] == "[0, 1, 2, 3, 4, 5, 6, 7, .."


def test_forward_calls_are_in_the_order_of_the_model_with_local_shapes(load):
    one, layout = load(), load("dp.degree=2", "tp.degree=2")
    batch = trace.first_microbatch(one)
    calls = {"one": trace.forward_calls(one, batch), "tp2": trace.forward_calls(layout, batch)}
    first = calls["one"].index[:4].tolist()
    assert first == [("embedding", "lookup"), *(("layers.0.attention", s) for s in ("column", "attend", "row"))]
    column = calls["one"].loc[("layers.0.attention", "column")]
    assert column.tolist() == ["(8, 64, 64)", "(8, 64, 64), (8, 64, 16) ×2", 0]
    table = trace.side_by_side(calls)
    assert table.loc[("layers.0.attention", "attend"), "tp2"] == "(4, 64, 4, 8)" and not table.isna().any(axis=None)


def test_bytes_of_a_call_are_its_own_and_add_up_to_the_ledger(load):
    """The shared expert runs inside `experts`: what its products receive is not counted twice."""
    config = load("tp.degree=2")
    batch = trace.first_microbatch(config)
    received = trace.forward_calls(config, batch)["bytes received"]
    assert received[("layers.1.ffn", "experts")] == 0 < received[("layers.1.ffn.shared", "column")]
    with trace.on_rank(config) as built, torch.no_grad():
        built.model(trace.cut_batch(batch, config, built.mesh))
        assert received.sum() == sum(built.mesh.ledger.bytes.values())


def test_counting_one_seam_says_what_its_formula_says(load):
    methods = ("ring", "all_gather", "ulysses")
    configs = {m: load("cp.degree=4", f"cp.method={m}", "train.microbatches=1") for m in methods}
    batch = trace.first_microbatch(configs["ring"])
    formulas = by_formula(configs, traffic)
    told = formulas[[c for c in formulas if c.endswith(", F")]].sum(axis=1)
    assert trace.by_counting(configs, batch, rank=0, seam="attend").to_dict() == told.to_dict()
    assert trace.by_counting(configs, batch, rank=3, seam="attend")["ring"] < told["ring"]


def test_tokens_have_one_holder_and_pairs_one_worker():
    for balance in BALANCES:
        assert np.bincount(holders(balance, 64, 4)).tolist() == [16] * 4
        assert work(64, 4, [balance]).pairs.sum() == 64 * 65 / 2
    table = work(64, 4)
    assert table.loc["zigzag", "over the mean"].tolist() == [1.0] * 4
    assert table.loc["none", "keys come"].tolist() == [0, 16, 32, 48]
    assert work(64, 4, ["none"], window=8)["keys come"].tolist() == [0, 7, 7, 7]


def test_the_square_is_strong_at_home_pale_away_and_white_where_nothing_is_seen():
    (axes,) = square(8, 2, ["none"], window=6).axes
    (image,) = axes.images
    colours = image.get_array()
    assert colours[0, 0].tolist() == pytest.approx(to_rgb(COLOURS[0])) and colours[7, 7].tolist() == pytest.approx(
        to_rgb(COLOURS[1])
    )
    assert colours[0, 1].tolist() == colours[7, 1].tolist() == [1.0, 1.0, 1.0]
    assert all(0 < away < 1 for away in colours[4, 3] - colours[4, 4])


def test_parameters_tell_what_a_rank_holds(load):
    table = trace.parameters(load("tp.degree=4"), rank=3)
    assert table.loc["layers.1.attention.wk"].tolist()[1:] == [(16, 64), 1024, "kv_heads over tp", (8, 64), 512, "tp"]
    assert table.loc["layers.1.attention.wq", "copies along"] == "–"
    assert (table.cut[table.dims.str.contains("expert")] == "").all(), "an axis of degree 1 cuts nothing"


def test_training_here_is_training_anywhere(load):
    steps = trace.trained(load("train.steps=2", "train.warmup_steps=0"))
    assert steps.index.tolist() == [0, 1] and steps.tokens.tolist() == [1024, 1024]
    assert steps.loss[1] < steps.loss[0] < 5.7


def test_a_layout_is_refused_where_there_is_one_process(load):
    with pytest.raises(ValueError, match="the degrees make 2 ranks, the world has 1"):
        trace.trained(load("dp.degree=2"))


def test_schedules_stand_beside_each_other():
    table = comparison(timelines(4, 8))
    assert table.index.tolist() == list(FAMILIES)
    assert table.loc["1f1b"].tolist() == [1, 33.0, 6 / 22, 6 / 22, 4.0, 1.0]
    assert table.weights["dualpipe"] == 2.0 and table["stages a rank"]["zbv"] == 2
    slow = comparison(timelines(4, 8, ["1f1b"], times=(1, 1, 1, 0.2)))
    assert slow.step["1f1b"] > table.step["1f1b"]


def test_bubbles_are_those_of_the_formula():
    table = bubbles(4, [1, 8], ["gpipe"])
    assert table["gpipe"].tolist() == pytest.approx([3 / 4, 3 / 11]) and table.index.name == "microbatches"


def test_a_formula_stands_beside_what_was_counted(make_row):
    config = {"tp": {"degree": 2}}
    row = make_row("tp2", config=config, comm_bytes={"tp": {"row/x/F": 12.5, "gradients/y/BW": 7.0}})

    def traffic(config):
        return {"row/x/F": Fraction(25 * config.tp.degree, 4), "row/x/BW": Fraction(3)}

    table = against([row], "tp", traffic)
    assert config_of(row).tp.degree == 2
    assert table.loc["tp2"].to_dict("index") == {
        "row/x/F": {"by formula": 12.5, "counted": 12.5},
        "row/x/BW": {"by formula": 3.0, "counted": 0.0},
    }
    assert isinstance(table.index, pd.MultiIndex)


def test_formulas_of_configs_stand_beside_each_other(load):
    def traffic(config):
        return {
            "row/x/F": Fraction(config.tp.degree),
            "row/y/F": Fraction(1, 2),
            **({"a/x/BW": 3} if config.tp.sequence else {}),
        }

    table = by_formula({"one": load(), "repeated": load("tp.degree=2", "tp.sequence=false")}, traffic)
    assert table.loc["one"].to_dict() == {"row, F": 1.5, "a, BW": 3.0}
    assert table.loc["repeated"].to_dict() == {"row, F": 2.5, "a, BW": 0.0}


def test_loss_gap_is_the_widest_at_any_step(make_row):
    rows = [make_row("a", losses=[3.0, 2.0, 1.0]), make_row("b", losses=[3.5, 2.0])]
    assert loss_gap(rows) == 0.5 and loss_gap(rows[:1]) == 0.0 and loss_gap([]) == 0.0


def test_a_small_picture_is_one_that_jupyter_shows():
    figure = Figure(figsize=(4, 2))
    figure.subplots().plot([1, 2])
    full, shown = io.BytesIO(), small(figure, dpi=100)
    figure.savefig(full, format="png", dpi=100)
    image = Image.open(io.BytesIO(shown._repr_png_()))
    assert image.size == (400, 200) and len(shown.png) < len(full.getvalue())
    assert repr(shown) == "<picture of 400 x 200>" and small(figure, dpi=100).png == shown.png
