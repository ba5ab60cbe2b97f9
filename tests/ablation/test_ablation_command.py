"""`python -m experiments.ablate`: arms without a row only, all of them, and an exit status that tells failures."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments import ablate
from research.config import RunConfig
from research.launch.local import RankError
from research.record import Row, load, read, run_id, write

ROOT = Path(__file__).parents[2]
TEMPLATE = read(ROOT / "tests" / "report" / "row.json")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[str]]]:
    """Runs the command; arms whose name begins with `bad` fail, others write an invented row.

    Returns the exit status and the runs that were started, as arm and seed.
    """

    def run(path: Path, *words: str) -> tuple[int, list[str]]:
        started: list[str] = []

        def launch(function, config: RunConfig, where: object) -> Row:
            started.append(f"{config.record.arm}{config.train.seed}")
            if config.record.arm.startswith("bad"):
                raise RankError(1, f"ValueError: {config.record.arm} is bad")
            labels = {"ablation": config.record.ablation, "arm": config.record.arm, "seed": config.train.seed}
            row = dataclasses.replace(TEMPLATE, run_id=run_id(config), **labels)
            write(row, config.record.folder)
            return row

        monkeypatch.setattr(ablate, "launch", launch)
        monkeypatch.setattr(sys, "argv", ["ablate", str(path), f"record.folder={tmp_path / 'results'}", *words])
        return ablate.main(ablate.__doc__, ablate.ablate), started

    return run


def test_only_what_is_missing_runs(ablation, command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(ablation(seeds=[0, 1])) == (0, ["one0", "one1", "two0", "two1"])
    assert "4 runs, 0 have their row, 4 to do" in capsys.readouterr().out
    assert command(ablation(seeds=[0, 1])) == (0, [])
    assert "4 runs, 4 have their row, 0 to do" in capsys.readouterr().out
    next(p for p in (tmp_path / "results" / "rows").iterdir() if "-two-s1-" in p.name).unlink()
    assert command(ablation(seeds=[0, 1])) == (0, ["two1"])
    assert command(ablation(seeds=[0, 1], arms={"one": [], "new": ["model.ffn=8"]})) == (0, ["new0", "new1"])
    assert command(ablation(), "train.lr=0.5") == (0, ["one0", "two0"])


def test_an_arm_that_fails_does_not_stop_the_others(ablation, command, capsys: pytest.CaptureFixture[str]) -> None:
    path = ablation(arms={"bad1": [], "good": [], "bad2": []})
    assert command(path) == (1, ["bad10", "good0", "bad20"])
    out, err = capsys.readouterr()
    assert "2 of 3 runs failed: bad1, seed 0; bad2, seed 0" in err and "ValueError: bad1 is bad" in err
    assert "good" in out.partition("3 to do")[2]  # its table
    assert command(path) == (1, ["bad10", "bad20"])  # what failed is still to do


def test_when_all_fail_the_command_fails(ablation, command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(ablation(arms={"bad1": [], "bad2": []})) == (1, ["bad10", "bad20"])
    assert "2 of 2 runs failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"arms": {"one": [], "two": ["model.dmi=3"], "three": ["train.lr=x"]}}, ["arm two: model.dmi", "arm three: "]),
        ({"seeds": "x", "question": None}, ["seeds=x is not a list", "question is missing"]),
    ],
)
def test_nothing_runs_when_something_is_wrong(ablation, command, capsys, entries: dict, told: list[str]) -> None:
    assert command(ablation(**entries)) == (2, [])
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("2 problems in the config:") and all(part in err for part in told)


@pytest.mark.timeout(120)
def test_the_command_in_earnest(ablation, tmp_path: Path, text: Path) -> None:
    """Two arms train and one breaks down in its second step; the second time only that one starts."""
    path = ablation(arms={"breaks": ["train.lr=1e300"], "one": [], "two": ["dp.degree=2"]})
    words = [f"record.folder={tmp_path}", f"data.path={text}", f"data.cache={tmp_path / 'cache'}"]
    words += ["train.steps=2", "train.warmup_steps=1", "launch.threads=1"]
    for todo in ("3 runs, 0 have their row, 3 to do", "3 runs, 2 have their row, 1 to do"):
        command = [sys.executable, "-m", "experiments.ablate", str(path), *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1, done.stderr
        assert todo in done.stdout
        assert "1 of 3 runs failed: breaks, seed 0" in done.stderr and "FloatingPointError: step 1" in done.stderr
        assert [(r.arm, r.hardware.ranks) for r in load(tmp_path)] == [("one", 1), ("two", 2)]
