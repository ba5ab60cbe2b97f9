"""Ranks are forked from the test process, which must not run threaded kernels before."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def text(tmp_path):
    """A small corpus: enough for 16 samples of 64 bytes."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i} of a small text, {i * i} squared\n" for i in range(200)), encoding="utf-8")
    return path
