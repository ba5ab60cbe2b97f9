"""Layouts of the proof model on a small text."""

import pytest

from research.settings import load


@pytest.fixture
def layout(text, tmp_path):
    def made_of(*words):
        given = [f"data.path={text}", f"data.cache={tmp_path}/cache", f"record.folder={tmp_path}", *words]
        return load("experiments/configs/tiny.yaml", given)

    return made_of
