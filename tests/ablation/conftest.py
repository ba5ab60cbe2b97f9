"""Ablation files for tests."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

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
