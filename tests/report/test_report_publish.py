"""From a folder of rows to files, and what the command says when there is nothing to do."""

import pandas as pd
import pytest

from experiments import tables
from research.record import write
from research.report.publish import by_ablation, write_tables
from research.report.tables import frame, markdown

ORDER = ["one", "dp2", "dp4"]


@pytest.fixture
def folder(rows, make_row, tmp_path):
    for row in [*rows, make_row("", ablation="", run_id="run-s0-0123abcd")]:
        write(row, tmp_path)
    return tmp_path


def test_writes_page_data_and_figure(folder, rows):
    written = write_tables(folder, "axes", rows, ORDER)
    assert [str(p.relative_to(folder)) for p in written] == ["tables/axes.md", "tables/axes.csv", "figures/axes.png"]
    page = written[0].read_text(encoding="utf-8")
    assert page.startswith(markdown(rows, "axes", ORDER)) and "](../figures/axes.png)" in page


def test_csv_reads_back_to_the_same_numbers(folder, rows):
    _, data, _ = write_tables(folder, "axes", rows, ORDER)
    back = pd.read_csv(data)
    pd.testing.assert_frame_equal(back, frame(rows, ORDER), check_exact=True, check_dtype=False)


def test_rows_without_ablation_stand_under_runs(folder):
    assert {name: len(rows) for name, rows in by_ablation(folder).items()} == {"axes": 3, "runs": 1}


def test_command_writes_every_ablation_and_prints_it(folder, capsys):
    assert tables.main([str(folder)]) == 0
    out = capsys.readouterr().out
    assert "# axes" in out and "# runs" in out and "run-s0-0123abcd" in out
    assert str(folder / "figures" / "axes.png") in out
    assert sorted(p.name for p in (folder / "tables").iterdir()) == ["axes.csv", "axes.md", "runs.csv", "runs.md"]


def test_command_takes_arms_and_baseline_from_the_ablation(folder, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "ABLATIONS", tmp_path)
    head = "question: q\nprediction: p\nbase: b.yaml\nseeds: [0]\narms:\n"
    (tmp_path / "axes.yaml").write_text(head + "  dp4: []\n  one: []\n  tp2: []\n  dp2: []\n")
    assert tables.main([str(folder), "axes"]) == 0
    out = capsys.readouterr().out
    assert "over dp4" in out and "[1] tp2: has not run." in out
    assert "# runs" not in out
    assert out.index("| dp4 ") < out.index("| one ") < out.index("| dp2 ")


def test_command_without_rows_says_so(tmp_path, capsys):
    assert tables.main([str(tmp_path)]) == 1
    assert f"no rows in {tmp_path / 'rows'}" in capsys.readouterr().err


def test_command_names_the_ablations_there_are(folder, capsys):
    assert tables.main([str(folder), "axis"]) == 1
    assert "no rows of axis" in (err := capsys.readouterr().err) and "axes, runs" in err
    assert not (folder / "tables").exists()


def test_command_names_a_broken_ablation(folder, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "ABLATIONS", tmp_path)
    (tmp_path / "axes.yaml").write_text("question: q\n")
    assert tables.main([str(folder), "axes"]) == 1
    assert "axes.yaml: arms is missing" in capsys.readouterr().err


def test_command_names_a_file_that_is_no_row(folder, capsys):
    (folder / "rows" / "broken.json").write_text("{}")
    assert tables.main([str(folder)]) == 1
    assert "broken.json is no Row" in capsys.readouterr().err
