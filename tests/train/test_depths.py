"""What a run with multi-token prediction leaves behind: losses by depth, and the load of each depth's experts."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from research.launch.local import start
from research.mesh import total_ranks
from research.models.mtp import Prediction
from research.record import read, row_path
from research.settings import load
from research.train.run import run

LIMIT_S = 60.0


def run_of(text, folder, *words):
    given = [f"data.path={text}", f"data.cache={folder}/cache", f"record.folder={folder}", "train.steps=4"]
    given += ["model.layers=2", "model.mtp_depth=2", "record.tensorboard=true", "record.warmup_steps=1", *words]
    config = load("experiments/configs/tiny.yaml", given)
    return start(lambda place, device: run(config, place, device), total_ranks(config), config.launch, LIMIT_S)[0]


@pytest.mark.parametrize("words", [(), ("dp.degree=2", "train.recompute=full")])
def test_row_and_scalars(text, tmp_path, words):
    row = run_of(text, tmp_path, *words)
    assert [len(of_depth) for of_depth in row.mtp_losses] == [4, 4]
    assert all(0 < last < first for first, *_, last in row.mtp_losses) and row.losses[-1] < row.losses[0]
    assert read(row_path(tmp_path, row.run_id)).mtp_losses == row.mtp_losses
    assert list(row.expert_choices) == ["layers.1", "mtp.1.layer", "mtp.2.layer"]
    assert {sum(counts) for counts in row.expert_choices.values()} == {4 * 16 * 64 * 2}
    board = EventAccumulator(str(tmp_path / "tensorboard" / row.run_id)).Reload()
    for k, of_depth in enumerate(row.mtp_losses, 1):
        assert [e.value for e in board.Scalars(f"loss/depth_{k}")] == pytest.approx(of_depth)
        assert len(board.Scalars(f"routing/mtp.{k}.layer/max_violation")) == 4


def test_a_depth_that_is_not_finite_is_told(text, tmp_path, monkeypatch):
    def poisoned(self, *given, real=Prediction.forward):
        h, aux = real(self, *given)
        return h * float("nan"), aux

    monkeypatch.setattr(Prediction, "forward", poisoned)
    with pytest.raises(RuntimeError, match="loss of depth 1 nan, loss of depth 2 nan"):
        run_of(text, tmp_path)
