"""Ablation files for tests, and the command over a stand-in for training."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments import ablate
from research.report import publish

BASE = Path(__file__).parents[2] / "experiments" / "configs" / "tiny.yaml"


@pytest.fixture
def ablation(tmp_path: Path) -> Callable[..., Path]:
    """Writes an ablation file; what is given replaces the entries of a good one, None leaves one out."""

    def write(name: str = "axes", **entries: object) -> Path:
        good: dict[str, object] = {
            "question": "Does it work?",
            "prediction": "It does.",
            "base": str(BASE),
            "seeds": [0],
            "arms": {"one": [], "two": ["train.global_batch=8"]},
        }
        path = tmp_path / f"{name}.yaml"
        # JSON is YAML in which all text stands in quotes
        path.write_text(json.dumps({k: v for k, v in (good | entries).items() if v is not None}))
        return path

    return write


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[str]]]:
    """Runs the command, which starts `stand_in.py` and draws no figures; returns its exit status and what was started,
    as arm and seed."""
    results = tmp_path / "results"
    monkeypatch.setattr(publish, "overview", lambda *args, **more: None)
    monkeypatch.setattr(ablate, "RUN", (sys.executable, str(Path(__file__).with_name("stand_in.py"))))

    def run(path: Path, *words: str) -> tuple[int, list[str]]:
        before = started()
        monkeypatch.setattr(sys, "argv", ["ablate", str(path), f"record.folder={results}", *words])
        status = ablate.main(ablate.__doc__, ablate.ablate)
        return status, started()[len(before) :]

    def started() -> list[str]:
        return (results / "starts").read_text().split() if (results / "starts").exists() else []

    return run
