"""Runs of the proof model on a small text, and what they leave."""

from functools import partial

import pytest

from experiments.command import CHECKS
from research.launch.local import start
from research.mesh import total_ranks
from research.settings import load
from research.train.run import run

LIMIT_S = 60.0


@pytest.fixture
def configure(text, tmp_path):
    """configure("dp.degree=2", ...) -> a config of six steps in float64, whose files go to tmp_path."""

    def made(*words):
        here = [f"data.path={text}", f"data.cache={tmp_path}/cache", f"record.folder={tmp_path}", "train.steps=6"]
        small = ["model.layers=2", "model.bias_rate=0.01", "launch.threads=1", "record.warmup_steps=0"]
        return load("experiments/configs/tiny.yaml", [*here, *small, *words], CHECKS)

    return made


@pytest.fixture
def trained(configure):
    """trained("dp.degree=2", ...) -> the row."""

    def made(*words):
        config = configure(*words)
        return start(partial(run, config), total_ranks(config), config.launch, LIMIT_S)[0]

    return made
