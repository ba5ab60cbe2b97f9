"""One reference a config, however many layouts are held against it."""

import pytest

from experiments.command import CHECKS
from research import settings
from research.record import config_hash
from research.train.proof import compare, reference_of, snapshots

TINY = "experiments/configs/tiny.yaml"
LIMIT_S = 60.0  # for each group of ranks
FEW = "train.steps=3"  # of `verify`'s five


@pytest.fixture(scope="session")
def prove(tmp_path_factory):
    """prove("dp.degree=2", ...) -> findings of that layout of the proof model, worst first, over three steps."""
    references = {}

    def run(*words: str):
        config = settings.load(TINY, [FEW, *words], CHECKS)
        one = reference_of(config)
        key = config_hash(settings.to_mapping(one))
        if key not in references:
            references[key] = next(snapshots(one, tmp_path_factory.mktemp("one") / "ranks", LIMIT_S))
        return compare(references[key], snapshots(config, tmp_path_factory.mktemp("layout") / "ranks", LIMIT_S))

    return run
