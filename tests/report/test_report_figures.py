"""Figures are whole PNG files whose curves can be told apart, and say where they cannot."""

import io
import itertools
import math
import sys

from matplotlib.figure import Figure
from matplotlib.image import imread

from research.report import figures
from research.report.figures import COLOURS, losses, overview, throughput


def test_overview_is_a_png_with_something_on_it(rows, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it, which is global state, would fail
    path = tmp_path / "figures" / "axes.png"
    overview(rows, path, ["one", "dp2", "dp4"], "axes")
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert content[-8:-4] == b"IEND"
    pixels = imread(io.BytesIO(content))
    assert pixels.shape[0] > 400 and pixels.shape[1] > 1000
    curves = pixels[100:, : pixels.shape[1] // 2, :3]  # without the bars and the legend
    shades = {tuple(p) for p in (curves * 255).round().astype(int).reshape(-1, 3)}
    assert {tuple(bytes.fromhex(c[1:])) for c in COLOURS[:3]} <= shades  # also where curves lie on each other
    assert [p.name for p in path.parent.iterdir()] == ["axes.png"]


def test_same_rows_same_picture(rows, tmp_path):
    for name, given in (("a", rows), ("b", rows[::-1])):
        overview(given, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_coinciding_curves_differ_in_look_and_are_named(rows, make_row):
    apart = make_row("moe", dp=8, noise=0.5)
    axes = losses([*rows, apart]).axes[0]
    curves = axes.get_lines()[:4]
    assert len({c.get_color() for c in curves}) == 4
    assert [c.is_dashed() for c in curves] == [False, True, True, True]
    widths = [c.get_linewidth() for c in curves]
    assert all(below > above for below, above in itertools.pairwise(widths))  # the later, the narrower
    title = axes.get_legend().get_title().get_text()
    assert title.startswith("overlapping, at most 2e-07 nats apart") and "one, dp2, dp4" in " ".join(title.split())
    assert "moe" not in title
    assert axes.get_lines()[4].get_label() == "unigram entropy 3.250"
    assert axes.get_lines()[4].get_linestyle() == "--"


def test_axes_have_units(rows):
    assert losses(rows).axes[0].get_ylabel() == "cross-entropy loss (nats per token)"
    assert losses(rows).axes[0].get_xlabel() == "optimizer step"
    assert throughput(rows).axes[0].get_xlabel().startswith("tokens/s")


def test_bars_show_rate_ratio_and_kind(rows, make_row):
    dry = make_row("dp8", dp=8, kind="dry", losses=[], loss=math.nan, tokens_per_s=4000.0)
    axes = throughput([*rows, dry]).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [1000, 1810, 2500, 4000]
    assert [t.get_text() for t in axes.texts] == ["1,000  (1.00×)", "1,810  (1.81×)", "2,500  (2.50×)", "4,000"]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["one", "dp2", "dp4", "dp8, dry"]
    assert [bool(bar.get_hatch()) for bar in axes.patches] == [False, False, False, True]


def test_bars_of_imbalance_where_experts_are_counted(rows, make_row, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(figures, "Figure", lambda **given: made.append(Figure(**given)) or made[-1])
    moe = make_row("moe", max_violation={"layers.1": 1.0, "layers.2": 2.0})
    for given in (rows, [*rows, moe]):
        overview(given, tmp_path / "axes.png", ["one", "dp2", "dp4", "moe"])
    assert [len(figure.axes) for figure in made] == [2, 3]
    panel = made[1].axes[2]
    assert panel.get_xlabel().startswith("MaxVio")
    assert [bar.get_width() for bar in panel.patches] == [0, 0, 0, 1.5]
    assert [t.get_text() for t in panel.texts] == ["–", "–", "–", "1.50"]


def test_seeds_make_a_band_as_long_as_the_shortest_run(make_row):
    axes = losses([make_row("one", losses=[3.0, 2.0, 1.0]), make_row("one", seed=1, losses=[4.0, 3.0])]).axes[0]
    assert list(axes.get_lines()[0].get_ydata()) == [3.5, 2.5]
    assert len(axes.collections) == 1


def test_rows_without_losses_and_of_one_step(make_row, tmp_path):
    overview([make_row("dry", kind="dry", losses=[], loss=math.nan)], tmp_path / "dry.png")
    overview([make_row("short", steps=1)], tmp_path / "short.png")
    assert losses([make_row("short", steps=1)]).axes[0].get_lines()[0].get_marker() == "o"
