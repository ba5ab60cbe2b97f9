"""The entry point under a real torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from research.record import load

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(90)
def test_two_ranks_of_torchrun_write_one_row(tmp_path: Path, text: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    config = ["-m", "experiments.run", "experiments/configs/tiny.yaml", "train.steps=2", "train.warmup_steps=1"]
    words = [f"record.folder={tmp_path}", f"data.path={text}", f"data.cache={tmp_path / 'cache'}", "launch.threads=1"]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [*command, *config, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    (row,) = load(tmp_path)
    assert list((tmp_path / "rows").iterdir()) == [tmp_path / "rows" / f"{row.run_id}.json"]
    assert row.hardware.ranks == 2 and row.hardware.nodes == 1 and row.config["dp"]["degree"] == 2
    assert len(row.losses) == 2 and row.comm_bytes["dp"]
    assert done.stdout.count("loss ") == 1 and str(tmp_path) in done.stdout
