"""What people watch: a table that lives at a terminal, and lines elsewhere."""

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from research import attempts, settings
from research.ablation import Ablation, Plan
from research.attempts import Progress
from research.config import RunConfig
from research.record import read, run_id, write
from research.sweep import board as boards
from research.sweep.board import Board

TEMPLATE = read(Path(__file__).parents[1] / "report" / "row.json")


@pytest.fixture
def runs(tmp_path: Path) -> list[RunConfig]:
    """One that is done, one that runs, one that failed, one that was not tried."""
    words = ["record.ablation=axes", f"record.folder={tmp_path}", "train.steps=30"]
    done, live, bad, new = (settings.load(None, [*words, f"record.arm={a}"]) for a in ("done", "live", "bad", "new"))
    write(
        dataclasses.replace(
            TEMPLATE, run_id=run_id(done), arm="done", loss=2.5, losses=[2.5] * 30, tokens_per_s=1000.0
        ),
        tmp_path,
    )
    folder = attempts.folder_of(live)
    attempts.write(dataclasses.replace(attempts.new(live), state="running", tries=1), folder)
    attempts.tell(Progress(12, 30, 3.21, 456.0), live)
    failed = dataclasses.replace(
        attempts.new(bad), state="failed", error="ValueError: x", evidence="exit code 1", tries=1
    )
    attempts.write(failed, attempts.folder_of(bad))
    return [done, live, bad, new]


def board(runs: list[RunConfig], terminal: bool) -> tuple[Board, io.StringIO]:
    ablation = Ablation("axes", "q", "p", Path("x"), (0,), {})
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, color_system=None)
    return Board(Plan(ablation, runs, {"tp3": "tp.degree=3 must divide model.heads=8"}), runs, console), out


def test_a_line_for_every_run_and_every_reason(runs: list[RunConfig]) -> None:
    shown, out = board(runs, terminal=True)
    with attempts.claimed(attempts.folder_of(runs[1])), shown:
        shown.say("[1/2] live")
    text = out.getvalue()
    lines = [line for line in text.splitlines() if "│" in line][-5:]
    cells = [[c.strip() for c in line.strip()[1:-1].split("│")] for line in lines]
    assert cells == [
        ["done", "0", "done", "30/30", "1,000", "2.5000"],
        ["live", "0", "running", "12/30", "456", "3.210"],
        ["bad", "0", "failed", "", "", ""],
        ["new", "0", "pending", "", "", ""],
        ["tp3", "", "impossible", "", "", ""],
    ]
    assert "[1/2] live" in text and "bad, seed 0: failed: ValueError: x (exit code 1)" in text
    assert "tp3: impossible: tp.degree=3 must divide model.heads=8" in text


def test_without_a_terminal_a_line_now_and_then(runs: list[RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    shown, out = board(runs, terminal=False)
    with shown:
        shown.refresh(runs[1])
        assert out.getvalue() == ""
        monkeypatch.setattr(boards, "LINE_S", 0.0)
        shown.refresh(runs[1])
        assert out.getvalue() == "    step 12/30, loss 3.210, 456 tokens/s\n"
        shown.refresh(runs[3])
    assert out.getvalue().count("\n") == 1


def test_a_run_that_was_all_warm_up_tells_no_speed(runs: list[RunConfig], tmp_path: Path) -> None:
    short = dataclasses.replace(TEMPLATE, run_id=run_id(runs[0]), arm="done", tokens_per_s=float("nan"), timed_steps=0)
    write(short, tmp_path)
    shown, out = board(runs, terminal=True)
    with shown:
        shown.say("")
    assert "done" in out.getvalue() and "nan" not in out.getvalue()
