"""The code passes the linter and the type checker."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)  # mypy reads all of torch's types the first time; its cache in .mypy_cache stays
@pytest.mark.parametrize("command", ["ruff check .", "mypy"])
def test_passes(command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
