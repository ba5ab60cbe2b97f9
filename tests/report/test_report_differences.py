"""What each axis costs and buys: the committed rows of the ablation of all axes, and the table that is counted."""

import dataclasses
from pathlib import Path

import pytest

from experiments import axes
from experiments.command import CHECKS
from research import settings
from research.ablation import plan, read
from research.config import replace
from research.parallel.cp.cost import traffic as cp_traffic
from research.record import load
from research.report import differences
from research.report.differences import KINDS, along, bubble, by_axis, cuts, in_place_of
from research.report.formulas import config_of
from research.report.lines import loss_gap
from research.settings import flat, to_mapping

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "results" / "reference" / "five_axes"
ABLATION = read(axes.ABLATION)
ROUNDING = 1e-4  # nats: what the ablation predicts of float32


@pytest.fixture(scope="module")
def rows():
    return load(FOLDER)


@pytest.fixture(scope="module")
def configs(rows):
    return {row.arm: config_of(row) for row in rows}


@pytest.fixture(scope="module")
def large():
    return settings.load(axes.LARGE, [], CHECKS)


def test_every_arm_has_its_row_and_all_end_at_the_same_loss(rows):
    configs = {c.record.arm: dict(flat(to_mapping(c))) for c in plan(ABLATION, (), CHECKS).runs}
    found = {r.arm: dict(flat(to_mapping(config_of(r)))) for r in rows}
    assert found.keys() == configs.keys() and len(rows) == len(found)
    for arm, config in configs.items():
        assert {key for key, value in config.items() if found[arm][key] != value} <= {"record.folder"}, arm
    assert {len(r.losses) for r in rows} == {10} and not any(r.skipped_steps for r in rows)
    assert loss_gap(rows) < ROUNDING
    norms = [r.grad_norms for r in rows]
    assert max(max(step) / min(step) - 1 for step in zip(*norms, strict=True)) < ROUNDING
    assert max(r.hardware.ranks for r in rows) == 16


def test_an_axis_that_is_removed_takes_its_bytes_with_it(rows):
    sent = {r.arm: {a: sum(labels.values()) for a, labels in r.comm_bytes.items()} for r in rows}
    axes_of = {
        arm: {a for label in labels for a in label.split("*")} - {"stage", "world"} for arm, labels in sent.items()
    }
    assert axes_of["all"] == {"pp", "dp", "cp", "tp", "ep"} and axes_of["one_process"] == set()
    for axis in axes_of["all"]:
        assert axes_of[f"all_but_{axis}"] == axes_of["all"] - {axis}
    table = by_axis(rows, list(ABLATION.arms))
    assert table.index.tolist() == list(ABLATION.arms)
    for arm, labels in sent.items():
        assert table.loc[arm, "pp":].sum() * 2**20 == pytest.approx(sum(labels.values()))


@pytest.mark.parametrize("name", [n for n in KINDS if n not in ("CP", "EP")])
def test_formulas_say_what_rows_have_counted(rows, configs, name):
    """Where experts are, the data decides; for a ring see below."""
    kind = KINDS[name]
    (counted,) = (sum(r.comm_bytes[kind.axis].values()) for r in rows if r.arm == kind.arm)
    assert float(along(configs[kind.arm], kind.axis)) == counted


def test_a_ring_receives_what_its_fullest_rank_does_and_rows_count_each_label_alone(rows, configs):
    (counted,) = (r.comm_bytes["cp"] for r in rows if r.arm == "cp2")
    config = configs["cp2"]
    by_rank = [cp_traffic(config, rank) for rank in range(2)]
    assert all(max(n.get(label, 0) for n in by_rank) == counted[label] for label in {*by_rank[0], *by_rank[1]})
    assert along(config, "cp") - counted["gradients/all_reduce/BW"] == max(sum(n.values()) for n in by_rank)


def test_cuts_are_those_of_layouts_and_of_the_batch(configs):
    found = {name: cuts(configs[k.arm]) - cuts(configs[k.over]) for name, k in KINDS.items()}
    assert found == {
        "DP": {"samples"},
        "ZeRO-3": set(),
        "TP": {"heads", "kv_heads", "ffn", "vocab"},
        "SP": {"tokens of the residual stream"},
        "PP": {"layers"},
        "CP": {"tokens"},
        "EP": {"expert"},
    }


def test_the_bubble_is_that_of_the_schedule(configs):
    """1F1B of p ranks and m microbatches: (p - 1) / (m + p - 1)."""
    assert bubble(configs["pp2"]) == pytest.approx(1 / 5) and bubble(configs["dp2"]) == 0
    assert bubble(replace(configs["pp2"], {"pp.schedule": "zb_h2", "train.microbatches": 8})) < 1 / 9


def test_the_large_layouts_are_legal_and_need_what_formulas_say(configs, large):
    for kind in KINDS.values():
        config = in_place_of(configs[kind.arm], large, axes.DEGREE)
        assert [str(p) for check in CHECKS for p in check(config)] == []
    pipeline = in_place_of(configs["pp2"], large, axes.DEGREE)
    tokens = large.train.global_batch * large.data.sequence
    assert along(pipeline, "pp") == 2 * tokens * large.model.dim * 2  # in and out, bfloat16


def test_the_page_is_the_committed_one_and_the_readme_shows_it(tmp_path, capsys, rows, large):
    page = differences.page(rows, large, axes.DEGREE, list(ABLATION.arms))
    assert page == (FOLDER / "tables" / "axes.md").read_text(encoding="utf-8"), "python -m experiments.axes"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tables = [part for part in page.split("\n\n") if part.startswith("|")]
    assert len(tables) == 2 and all(table in readme for table in tables)
    assert by_axis(rows[::-1], list(ABLATION.arms)).equals(by_axis(rows, list(ABLATION.arms)))


def test_a_row_that_is_missing_is_named(rows, large, tmp_path, capsys):
    with pytest.raises(ValueError, match="there is no row of dp2, pp2"):
        differences.differences([r for r in rows if r.arm not in ("dp2", "pp2")], large, 8)
    assert axes.main([str(tmp_path)]) == 1 and "there is no row of" in capsys.readouterr().err


@pytest.mark.parametrize("arm", ["dp2", "cp2"])
def test_planted_a_rank_that_learns_something_else_is_seen(rows, arm):
    """A gradient that is not summed over the axis: the first loss is right, later ones are not."""
    wrong = [
        dataclasses.replace(r, losses=[r.losses[0], *(x + 2e-4 for x in r.losses[1:])]) if r.arm == arm else r
        for r in rows
    ]
    assert loss_gap(wrong) > ROUNDING
