"""The table says what the rows say, in the same bytes every time, and hides nothing."""

import dataclasses
import itertools
import math

import pytest

from research.record import Row
from research.report.absent import Absent
from research.report.latex import latex
from research.report.lines import arm_of, layout, lines, ratio
from research.report.tables import comparison, frame, markdown, wire_frame

ORDER = ["one", "dp2", "dp4"]
ABSENT = [
    Absent("tp3", None, 0, "impossible", "tp.degree=3 must divide model.heads=8"),
    Absent("two", 0, 0, "failed", "ValueError: x", "exit code 1"),
    Absent("two", 1, 0, "pending"),
    Absent("dp4", 1, 1, "timed out", "", "ran past its limit of 5 min, killed by SIGTERM"),
]


def cells(page: str, name: str) -> dict[str, str]:
    """Header -> cell of the line called `name` in the first table of a page."""
    table = [[c.strip() for c in t.strip("|").split("|")] for t in page.splitlines() if t.startswith("|")]
    line = next(t for t in table if t[0] == name)
    return dict(zip(table[0], line, strict=True))


def notes(page: str) -> list[str]:
    return [t.removeprefix("- ") for t in page.splitlines() if t.startswith("- ")]


def test_same_rows_same_bytes(rows, make_row):
    rows = [*rows, make_row("dp2", dp=2, seed=1), make_row("extra", dp=2), make_row("dp4", dp=4, kind="dry")]
    for order in (None, ORDER):
        pages = {markdown(p, "axes", order) for p in itertools.permutations(rows[:4] + rows[-1:])}
        assert len(pages) == 1
    assert frame(rows, ORDER).equals(frame(rows[::-1], ORDER))


def test_arms_come_as_ordered_and_the_first_is_the_baseline(rows):
    assert [line.name for line in lines(rows, ["dp4", "one", "dp2"])] == ["dp4", "one", "dp2"]
    assert [line.name for line in lines(rows)] == ORDER  # from few ranks to many
    page = markdown(rows, "axes", ["dp2", "one", "dp4"])
    assert [cells(page, arm)["over dp2"] for arm in ORDER] == ["0.55×", "1.00×", "1.38×"]
    assert cells(markdown(rows, "axes", ORDER), "dp2")["over one"] == "1.81×"


def test_values_have_readable_units(rows):
    line = cells(markdown(rows, "axes", ORDER), "dp2")
    assert line["peak (MiB)"] == "2.00"  # parameters and gradients of 1 MiB each
    assert line["received (MiB)"] == "1.00"
    assert line["step (ms)"] == "141"
    assert line["unigram entropy (nats)"] == "3.2500"
    page = markdown(rows, "axes", ORDER)
    assert "Parameters: 250 k." in page and "Tokens trained on: 30.7 k." in page
    assert "Commit: 0123abc." in page and "Hardware: synthetic, 1 node, 1 thread a rank" in page
    assert "Lines differ in: dp.degree." in page


def test_depths_have_columns_where_there_are_any(rows, make_row):
    assert not any("depth" in name for name in frame(rows)) and "of depth" not in markdown(rows, "axes", ORDER)
    rows = [*rows, make_row("ahead", mtp_losses=[[5.0, 3.0], [5.5, 4.0]])]
    assert frame(rows).set_index("arm").loc["ahead", ["loss_depth_1", "loss_depth_2"]].tolist() == [3.0, 4.0]
    page = markdown(rows, "axes", [*ORDER, "ahead"])
    assert [cells(page, arm)["of depth 2 (nats)"] for arm in ("one", "ahead")] == ["–", "4.0000"]


def test_nothing_is_best_that_has_trained_on_more(rows):
    longer = [dataclasses.replace(r, tokens=2 * r.tokens) if r.arm == "dp4" else r for r in rows]
    page = markdown(longer, "axes", ORDER)
    assert [cells(page, arm)["tokens/s"] for arm in ORDER] == ["1,000", "**1,810**", "2,500"]


def test_imbalance_has_a_column_where_experts_are_counted(rows, make_row):
    assert "max_violation" not in frame(rows) and "MaxVio" not in markdown(rows, "axes", ORDER)
    even = make_row("even", max_violation={"layers.1": 0.25, "layers.2": 0.75})
    worst = [make_row("worst", seed=s, max_violation={"layers.1": 3.0 + s, "layers.2": 3.0}) for s in (0, 1)]
    rows = [*rows, even, *worst]
    table = frame(rows).set_index("arm")["max_violation"]
    assert table["even"] == 0.5 and table["worst"].tolist() == [3.0, 3.5] and math.isnan(table["one"])
    page = markdown(rows, "axes", [*ORDER, "even", "worst"])
    assert [cells(page, arm)["MaxVio"] for arm in ("one", "even", "worst")] == ["–", "**0.500**", "3.25 ± 0.354"]
    assert sum(n.startswith("MaxVio: choices of the busiest expert") for n in notes(page)) == 1


def test_best_is_bold_and_equals_are_not(rows):
    page = markdown(rows, "axes", ORDER)
    assert [cells(page, arm)["tokens/s"] for arm in ORDER] == ["1,000", "1,810", "**2,500**"]
    assert cells(page, "dp4")["step (ms)"] == "**102**"
    assert all("*" not in cells(page, arm)["loss (nats)"] for arm in ORDER)  # equal to what is shown


def test_arms_without_a_row_have_a_line_and_a_footnote(rows):
    page = markdown(rows, "axes", ["one", "tp3", "dp2", "two", "dp4", "dp8"], absent=ABSENT)
    arms = [t.strip("|").split("|")[0].strip() for t in page.partition("## Traffic")[0].splitlines() if t[:1] == "|"]
    assert arms[2:] == ["one", "tp3 [1]", "dp2", "two [2]", "dp4", "dp8 [3]"]
    assert set(cells(page, "tp3 [1]").values()) == {"tp3 [1]", "–"}
    assert notes(page)[:3] == [
        "[1] tp3: impossible: tp.degree=3 must divide model.heads=8.",
        "[2] two: seed 0 failed: ValueError: x (exit code 1); seed 1 has not run.",
        "[3] dp8: there is no row.",
    ]
    late = "dp4: without seed 1, repetition 2, timed out (ran past its limit of 5 min, killed by SIGTERM)."
    assert late in notes(page)
    assert not any("no row" in n or "without" in n for n in notes(markdown(rows, "axes", ORDER)))
    assert "dp4: has rows, but is no arm of this ablation." in notes(markdown(rows, "axes", ["one", "dp2"]))


def test_data_has_a_line_for_each_run_without_a_row(rows):
    table = frame(rows, ORDER, ABSENT)
    assert [len(table), list(table["state"])] == [7, ["done"] * 3 + ["impossible", "failed", "pending", "timed out"]]
    failed = table.iloc[4]
    assert (failed["arm"], failed["error"], failed["evidence"]) == ("two", "ValueError: x", "exit code 1")
    assert math.isnan(failed["loss"]) and table["ranks"].tolist()[:3] == [1, 2, 4]
    assert "1,0,0,done" in frame(rows, ORDER, ABSENT).to_csv(index=False).replace("axes,one", "1")  # no 0.0


def test_a_baseline_need_not_be_the_first_arm(rows):
    page = markdown(rows, "axes", ORDER, baseline="dp2")
    assert cells(page, "one")["over dp2"] == "0.55×"


def test_repetitions_are_averaged_with_seeds(make_row):
    config = {"dp": {"degree": 1}, "record": {"arm": "one", "repeat": 1}, "train": {"steps": 30, "seed": 0}}
    again = make_row("one", run_id="r1", tokens_per_s=1200.0, config=config)
    page = markdown([make_row("one"), again], "axes")
    assert cells(page, "one")["tokens/s"] == "1,100 ± 141" and cells(page, "one")["runs"] == "2"
    assert frame([make_row("one"), again])["repeat"].tolist() == [0, 1]


def test_latex_says_the_same(rows):
    odd = dataclasses.replace(rows[1], hardware=dataclasses.replace(rows[1].hardware, device="A_1 & 50% #$^~{x}\\"))
    text = latex(comparison([rows[0], odd, rows[2]], "my axes", [*ORDER, "tp3"], absent=ABSENT))
    body = text.partition("\\midrule\n")[2].partition("\\bottomrule")[0].splitlines()
    assert len(body) == 5 and all(line.endswith(" \\\\") and line.count(" & ") == 12 for line in body)
    assert body[2].startswith("dp4 & measured & dp4 & 4 & 1 & 2.5799") and "\\textbf{2,500} & 2.50$\\times$" in body[2]
    assert body[3].startswith("tp3 {[}1{]} & -- & --")
    assert "{[}1{]} tp3: impossible: tp.degree=3 must divide model.heads=8.\\par" in text
    assert "A\\_1 \\& 50\\% \\#\\$\\textasciicircum{}\\textasciitilde{}\\{x\\}\\textbackslash{}" in text
    assert "\\label{tab:my-axes}" in text and text.count("\\begin{") == text.count("\\end{") == 3
    bare = text.replace("\\{", "").replace("\\}", "")
    assert bare.count("{") == bare.count("}")
    assert not [c for c in "±×–" if c in text]


def test_without_its_baseline_a_table_has_no_ratios(rows):
    page = markdown(rows[1:], "axes", ORDER)
    assert cells(page, "dp2")["over one"] == cells(page, "dp4")["over one"] == "–"
    assert any(n.startswith("No ratio where one") for n in notes(page))


def test_seeds_are_averaged_with_their_spread(rows, make_row):
    rates = {0: 1000.0, 1: 1100.0, 2: 1200.0}
    seeds = [make_row("one", seed=s, noise=0.1 * s, tokens_per_s=rate) for s, rate in rates.items()]
    page = markdown([*seeds, *rows[1:]], "axes", ORDER)
    line = cells(page, "one")
    assert line["runs"] == "3"
    assert line["tokens/s"] == "1,100 ± 100"
    assert line["loss (nats)"] == f"{seeds[1].loss:.4f} ± 0.1000"
    assert line["step (ms)"] == "250"  # the same in all three
    assert cells(page, "dp2")["over one"] == "1.65×"  # 1810 / 1100
    assert any("±" in n for n in notes(page)) and not any("±" in n for n in notes(markdown(rows, "axes")))


def test_kinds_are_marked_and_never_compared(rows, make_row):
    dry = make_row("dp4", dp=4, kind="dry", run_id="d", losses=[], loss=math.nan, tokens_per_s=9000.0)
    page = markdown([*rows, dry], "axes", ORDER)
    assert cells(page, "dp4 (1)")["kind"] == "measured" and cells(page, "dp4 (2)")["kind"] == "dry"
    assert cells(page, "dp4 (2)")["over one"] == "–"
    assert cells(page, "dp4 (1)")["tokens/s"] == "**2,500**"
    assert cells(page, "dp4 (2)")["tokens/s"] == "9,000"
    assert "dp4 (1), dp4 (2): lines of one arm that differ in kind." in notes(page)


def test_rows_of_one_arm_with_other_configs_are_not_averaged(rows, make_row):
    longer = make_row("dp2", dp=2, seed=1, steps=60)
    page = markdown([*rows, longer], "axes", ORDER)
    assert cells(page, "dp2 (1)")["runs"] == cells(page, "dp2 (2)")["runs"] == "1"
    assert "dp2 (1), dp2 (2): lines of one arm that differ in train.steps." in notes(page)


def test_a_ratio_needs_the_same_device(rows):
    other = dataclasses.replace(rows[1], hardware=dataclasses.replace(rows[1].hardware, device="another"))
    found = lines([rows[0], other], ORDER)
    assert ratio(found[1], "one", found) is None
    assert "another, 1 node" in markdown([rows[0], other], "axes", ORDER)


def test_a_ratio_needs_one_baseline(rows, make_row):
    found = lines([*rows, make_row("one", seed=1, steps=60)], ORDER)
    assert [ratio(line, "one", found) for line in found] == [None] * 4


def test_skipped_steps_and_local_changes_are_told(rows, make_row):
    page = markdown([rows[0], make_row("dp2", dp=2, skipped_steps=3, dirty=True)], "axes")
    assert "dp2: 3 steps skipped." in notes(page)
    assert "0123abc with local changes (dp2)" in page


def test_traffic_by_axis_and_label(rows, make_row):
    traffic = wire_frame(rows, ORDER)
    assert traffic.loc[("dp", "gradients/all_reduce/backward"), "dp2"] == 1048576
    assert math.isnan(traffic.loc[("dp", "loss/all_reduce/forward"), "one"])
    page = markdown(rows, "axes", ORDER)
    assert "| dp     | loss/all_reduce/forward       | 0.000488 | 0.000488 |" in page
    assert "Nothing crossed between ranks." in markdown([make_row("one")], "axes")


def test_frame_adds_up_axes(make_row):
    comm = {"tp": {"activations/all_gather/forward": 30.0}, "dp": {"a": 1.0, "b": 2.0}}
    table = frame([make_row("x", comm_bytes=comm), make_row("y")]).set_index("arm")
    assert table.loc["x", ["wire_bytes_dp", "wire_bytes_tp", "wire_bytes"]].tolist() == [3.0, 30.0, 33.0]
    assert table.loc["y", "wire_bytes"] == 0
    assert table.loc["x", "peak_bytes"] == 2 * 2**20


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"dp": {"degree": 1}}, "one process"),
        ({}, "one process"),
        ({"dp": {"degree": 4}}, "dp4"),
        ({"tp": {"degree": 2}, "pp": {"degree": 3}, "ep": {"degree": 2, "tensor": 2}}, "pp3 tp2 ep2 etp2"),
    ],
)
def test_layout(make_row, config, text):
    assert layout(make_row("x", config=config)) == text


def test_a_run_by_itself_goes_by_its_id(make_row):
    assert arm_of(make_row("", run_id="run-s0-0123abcd")) == "run-s0-0123abcd"


def test_no_rows_is_an_error():
    empty: list[Row] = []
    with pytest.raises(ValueError, match="no rows"):
        markdown(empty, "axes", ORDER)
