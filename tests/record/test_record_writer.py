"""A run of several ranks leaves one row, written once."""

from functools import partial
from pathlib import Path

import pytest

from research import record, settings
from research.launch.local import start
from research.record import Row, load
from research.train.run import run

TINY = Path(__file__).parents[2] / "experiments" / "configs" / "tiny.yaml"


@pytest.mark.timeout(60)
def test_only_one_rank_writes(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writers of the same row would leave one file as well: the writes are counted, in forked ranks too."""
    write = record.write

    def counted(row: Row, folder: str | Path) -> Path:
        with (tmp_path / "writes").open("a") as log:
            log.write("x")
        return write(row, folder)

    monkeypatch.setattr(record, "write", counted)
    words = [f"record.folder={tmp_path}", f"data.path={text}", f"data.cache={tmp_path / 'cache'}", "launch.threads=1"]
    config = settings.load(TINY, ["dp.degree=2", "train.steps=2", "train.warmup_steps=1", *words])
    rows = start(partial(run, config), 2, config.launch, limit_s=50)
    assert (tmp_path / "writes").read_text() == "x"
    assert repr(load(tmp_path)) == repr([rows[0]]) and rows[0].losses == rows[1].losses
