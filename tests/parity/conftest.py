"""One reference a config, however many layouts are held against it."""

import pytest

from experiments.command import CHECKS
from research import settings
from research.mesh import total_ranks
from research.record import config_hash
from research.train.proof import compare, reference_of, snapshots

TINY = "experiments/configs/tiny.yaml"
LIMIT_S = 60.0  # for each group of ranks
FEW = "train.steps=3"  # of `verify`'s five
MANY = 5  # ranks: a proof that takes them is slow


@pytest.hookimpl(tryfirst=True)  # before slow ones are left out
def pytest_collection_modifyitems(items):
    for item in items:
        words = getattr(item, "callspec", None) and item.callspec.params.get("words")
        if item.name.startswith("test_layout_equals_one_process") and words:
            config = settings.load(TINY, words.split() if isinstance(words, str) else words, CHECKS)
            if total_ranks(config) >= MANY:
                item.add_marker(pytest.mark.slow)


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
