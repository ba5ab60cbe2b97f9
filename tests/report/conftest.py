"""Rows for tests: a template of invented numbers, changed one field at a time."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from research.record import Row, read

MakeRow = Callable[..., Row]


@pytest.fixture
def make_row() -> MakeRow:
    template = read(Path(__file__).with_name("row.json"))

    def make(arm: str, dp: int = 1, seed: int = 0, noise: float = 0.0, steps: int = 30, **fields: object) -> Row:
        curve = [2.5 + 3 * math.exp(-step / 8) + noise for step in range(steps)]
        config = {"dp": {"degree": dp}, "train": {"steps": steps, "seed": seed}, "record": {"arm": arm}}
        made = {
            "run_id": f"axes-{arm}-s{seed}",
            "arm": arm,
            "seed": seed,
            "config": config,
            "hardware": dataclasses.replace(template.hardware, ranks=dp),
            "losses": curve,
            "loss": curve[-1],
        }
        return dataclasses.replace(template, **made | fields)  # type: ignore[arg-type]

    return make


@pytest.fixture
def rows(make_row: MakeRow) -> list[Row]:
    """One process and two dp arms that train alike, at different speeds."""
    gradients = {"dp": {"gradients/all_reduce/backward": 1048576.0, "loss/all_reduce/forward": 512.0}}
    return [
        make_row("one"),
        make_row("dp2", dp=2, noise=1e-7, tokens_per_s=1810.0, step_ms=141.0, comm_bytes=gradients),
        make_row("dp4", dp=4, noise=-1e-7, tokens_per_s=2500.0, step_ms=102.0, comm_bytes=gradients),
    ]
