"""Kernels that import this checkout, whatever the environment has installed."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="session")
def kernel_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def execute(kernel_environment):
    """execute(notebook, folder) -> the notebook as run from top to bottom in that folder."""

    def run(notebook: nbformat.NotebookNode, folder: Path = ROOT / "notebooks") -> nbformat.NotebookNode:
        resources = {"metadata": {"path": str(folder)}}
        client = NotebookClient(notebook, timeout=150, record_timing=False, resources=resources)
        return client.execute(env=kernel_environment)

    return run
