"""The runs of a sweep lie side by side in TensorBoard, and its page of hyper-parameters is filled."""

from functools import partial
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, get_experiment, list_session_groups
from tensorboard.plugins.hparams.backend_context import Context

from research.ablation import plan, read
from research.launch.local import start
from research.record import load, tensorboard_folder
from research.settings import load as load_config
from research.train.run import run

TINY = Path(__file__).parents[2] / "experiments" / "configs" / "tiny.yaml"


@pytest.mark.timeout(90)
def test_arms_by_name_with_their_hyper_parameters(tmp_path: Path, text: Path) -> None:
    head = f"question: q\nprediction: p\nbase: {TINY}\nseeds: [0]\narms:\n"
    (tmp_path / "axes.yaml").write_text(head + "  one: []\n  fast: [train.lr=0.02]\n")
    words = [f"record.folder={tmp_path}", f"data.path={text}", f"data.cache={tmp_path / 'cache'}", "launch.threads=1"]
    words += ["record.tensorboard=true", "train.steps=2", "train.warmup_steps=1", "model.layers=2"]
    for config in plan(read(tmp_path / "axes.yaml"), words).runs:
        start(partial(run, config), 1, config.launch, limit_s=80)

    board = tmp_path / "tensorboard" / "axes"
    runs = sorted(p.name for p in board.iterdir())
    assert [name.rsplit("-", 1)[0] for name in runs] == ["fast-s0", "one-s0"]
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(board)).Reload()
    context = Context(TBContext(data_provider=MultiplexerDataProvider(multiplexer, str(board)), logdir=str(board)))

    asked = api_pb2.GetExperimentRequest(experiment_name="")
    known = get_experiment.Handler(RequestContext(), context, "", asked).run()
    assert {"train.lr", "dp.degree", "model.experts", "record.arm"} <= {h.name for h in known.hparam_infos}
    assert "final/loss" in {m.name.tag for m in known.metric_infos}

    every = [api_pb2.Status.Value(name) for name in ("STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_RUNNING")]
    request = api_pb2.ListSessionGroupsRequest(experiment_name="", allowed_statuses=every, slice_size=10)
    found = list_session_groups.Handler(RequestContext(), context, "", request).run().session_groups
    rates = {g.hparams["record.arm"].string_value: g.hparams["train.lr"].number_value for g in found}
    losses = {g.hparams["record.arm"].string_value: g.metric_values[0].value for g in found}
    rows = {r.arm: r for r in load(tmp_path)}
    assert rates == {"one": rows["one"].config["train"]["lr"], "fast": 0.02}
    assert losses == pytest.approx({arm: row.loss for arm, row in rows.items()}, rel=1e-6)


def test_folders_of_runs() -> None:
    alone = load_config(None, ["record.folder=r"])
    arm = load_config(None, ["record.folder=r", "record.ablation=axes", "record.arm=axes-2", "record.repeat=1"])
    assert str(tensorboard_folder(alone)).startswith("r/tensorboard/run-s0-")
    assert str(tensorboard_folder(arm)).startswith("r/tensorboard/axes/axes-2-s0-r1-")
