import numpy as np
import pandas as pd
import pytest

from research.report.bars import curves, expert_loads, load_of, memory, peaks, received, scatter, stacked, traffic

PEAK = {"parameters": 4 * 2**20, "gradients": 2 * 2**20, "spare": 2**20, "master": 0}


def widths(figure):
    """Of each bar, by the piece that it shows."""
    (axes,) = figure.axes
    return {c.get_label(): [bar.get_width() for bar in c] for c in axes.containers}


def test_memory_stacks_categories_in_mib_and_leaves_out_what_nobody_has(make_row):
    figure = memory([make_row("one", peak_bytes=PEAK), make_row("two", peak_bytes={"parameters": 2**20})])
    assert widths(figure) == {"parameters": [4.0, 1.0], "gradients": [2.0, 0.0], "spare": [1.0, 0.0]}
    (axes,) = figure.axes
    assert [t.get_text() for t in axes.texts] == ["7", "1"]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["one", "two"]


def test_peaks_are_the_bars_as_numbers(make_row):
    table = peaks([make_row("one", peak_bytes=PEAK)])
    assert table.loc["one"].to_dict() == {"parameters": 4.0, "gradients": 2.0, "spare": 1.0}
    assert widths(stacked(table, "MiB")) == {"parameters": [4.0], "gradients": [2.0], "spare": [1.0]}


def test_bars_are_means_over_seeds(make_row):
    rows = [make_row("one", seed=s, peak_bytes={"parameters": (s + 1) * 2**20}) for s in (0, 1)]
    assert widths(memory(rows)) == {"parameters": [1.5]}


def test_traffic_adds_labels_up_by_axis(make_row):
    labels = {"tp": {"row/a/F": 2.0**20, "column/b/F": 2.0**20}, "dp": {"gradients/c/BW": 2.0**19}}
    row = make_row("tp2", comm_bytes=labels)
    assert received([row]).loc["tp2"].to_dict() == {"tp": 2.0, "dp": 0.5}
    assert widths(traffic([make_row("one", comm_bytes={}), row])) == {"dp": [0.0, 0.5], "tp": [0.0, 2.0]}


def test_traffic_of_one_process_is_an_empty_bar(make_row):
    figure = traffic([make_row("one", comm_bytes={})])
    assert widths(figure) == {} and [t.get_text() for t in figure.axes[0].texts] == ["0"]


@pytest.mark.parametrize("draw", [memory, traffic])
def test_figures_without_rows_are_refused(draw):
    with pytest.raises(ValueError, match="no rows"):
        draw([])


def test_loads_are_choices_over_the_even_share(make_row):
    row = make_row("moe", expert_choices={"layers.1": [10, 30], "layers.2": [20, 20]})
    assert load_of(row).to_numpy().tolist() == [[0.5, 1.5], [1.0, 1.0]]
    panel, _ = expert_loads([row, make_row("dense", expert_choices={})]).axes
    assert np.allclose(panel.images[0].get_array(), [[0.5, 1.5], [1.0, 1.0]])
    assert panel.get_title() == "moe: busiest 1.50 of the even share"
    with pytest.raises(ValueError, match="no row has experts"):
        expert_loads([make_row("dense", expert_choices={})])


def test_points_that_lie_on_each_other_are_named_together():
    table = pd.DataFrame({"arm": ["a", "b", "c"], "x": [1.0, 2.0, 1.0], "y": [3.0, 4.0, 3.0 + 1e-12]})
    (axes,) = scatter(table, "x", "y").axes
    assert [t.get_text() for t in axes.texts] == ["a, c", "b"] and axes.get_xlabel() == "x"


def test_curves_have_a_line_a_column():
    table = pd.DataFrame({"a": [1.0, 2.0], "b": [2.0, 1.0]}, index=pd.Index([1, 2], name="n"))
    figure = curves(table, "share", logarithmic=True)
    (axes,) = figure.axes
    assert [line.get_ydata().tolist() for line in axes.lines] == [[1.0, 2.0], [2.0, 1.0]]
    assert axes.get_xlabel() == "n" and [t.get_text() for t in axes.get_xticklabels()] == ["1", "2"]
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["a", "b"]
