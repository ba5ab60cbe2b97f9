"""Weights that come from elsewhere, one tensor at a time, and the command that starts and goes on."""

import pytest
import torch

from experiments import run as run_command
from research.config import RunConfig, replace
from research.launch.local import start
from research.mesh import Mesh
from research.problems import ConfigError
from research.settings import to_mapping
from research.train.checkpoint.choice import folder_of, told_start
from research.train.checkpoint.index import CheckpointError, newest, read_index
from research.train.checkpoint.saving import Checkpoints
from research.train.checkpoint.whole import StoredWeights, write_weights
from research.train.loop import Trainer
from research.train.proof import TOLERANCE


def named(count=6, dtype=torch.bfloat16):
    return {f"layers.{i}.w": torch.full((256, 4), float(i), dtype=dtype) for i in range(count)}


def test_sharded_files_come_back(tmp_path):
    write_weights(tmp_path, named().items(), {"model": {"dim": 4}}, shard_bytes=5000)
    assert [p.suffix for p in sorted(tmp_path.iterdir())] == [".safetensors"] * 3 + [".json"]  # 2048 bytes each
    stored = StoredWeights(tmp_path)
    assert stored.config == {"model": {"dim": 4}} and {k: e.shape for k, e in stored.entries.items()} == {
        k: (256, 4) for k in named()
    }
    for (name, got), (wanted_name, wanted) in zip(stored, named().items(), strict=True):
        assert name == wanted_name and got.dtype == wanted.dtype and torch.equal(got, wanted)
    assert torch.equal(stored.read("layers.3.w", ((10, 2), (1, 3))), torch.full((2, 3), 3.0, dtype=torch.bfloat16))


def test_no_more_than_a_shard_is_kept(tmp_path):
    """A generator that makes tensors when they are asked for: how many of them live at once is counted."""
    alive, most = set(), []

    def made():
        for i in range(40):
            tensor = torch.full((1000,), float(i))
            alive.add(i)
            torch.utils.weak.weakref.finalize(tensor, alive.discard, i)
            most.append(len(alive))
            yield f"w{i}", tensor
            del tensor

    write_weights(tmp_path, made(), {}, shard_bytes=16_000)
    assert max(most) <= 6 and len(list(StoredWeights(tmp_path))) == 40


def test_nothing_is_left_of_weights_that_break_off(tmp_path):
    def broken():
        yield from list(named().items())[:4]
        raise ValueError("layers.4.w is misshapen")

    with pytest.raises(ValueError, match="misshapen"):
        write_weights(tmp_path, broken(), {}, shard_bytes=2048)
    assert list(tmp_path.iterdir()) == []
    for twice in (2048, 2**20):
        with pytest.raises(CheckpointError, match=r"^layers\.0\.w comes twice"):
            write_weights(tmp_path, [*named().items(), *named(1).items()], {}, shard_bytes=twice)
        assert list(tmp_path.iterdir()) == []
    write_weights(tmp_path, named().items(), {})
    with pytest.raises(CheckpointError, match="holds a checkpoint already"):
        write_weights(tmp_path, named().items(), {})
    told = r"nowhere does not exist; legal: the folder of a checkpoint or of a run$"
    with pytest.raises(CheckpointError, match=told):
        StoredWeights(tmp_path / "nowhere")


def test_other_files_of_the_folder_stay(tmp_path):
    """Someone else's weights, say."""
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"precious")
    write_weights(tmp_path, named().items(), {})
    assert (tmp_path / "model-00001-of-00002.safetensors").exists()


def test_an_altered_weight_is_named(tmp_path):
    write_weights(tmp_path, named().items(), {}, shard_bytes=5000)
    path = sorted(tmp_path.glob("*.safetensors"))[1]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{path} was altered"):
        StoredWeights(tmp_path)


def test_a_run_starts_from_imported_weights(configure, tmp_path):
    """Whole bfloat16 tensors, into two ranks of a float64 run; they are no training to go on with."""
    config = configure("dp.degree=2", f"checkpoint.weights={tmp_path}/imported")
    source = Trainer(replace(config, {"train.seed": 5, "dp.degree": 1}), Mesh({}), torch.device("cpu"))
    weights = {n: p.detach().bfloat16() for n, p in source.built.model.named_parameters()}
    write_weights(tmp_path / "imported", weights.items(), to_mapping(config), shard_bytes=10_000)

    def body(place, device):
        trainer = Trainer(config, Mesh.from_config(config, place.world, place.rank), device)
        checkpoints = Checkpoints(trainer, "digest")
        assert checkpoints.first == 0
        return [n for n, p in trainer.built.model.named_parameters() if not torch.equal(p, weights[n].double())]

    assert start(body, 2, config.launch, 60.0) == [[], []]
    resume = replace(config, {"checkpoint.weights": "", "checkpoint.resume": f"{tmp_path}/imported", "dp.degree": 1})
    with pytest.raises(ConfigError, match=r"it holds weights only; checkpoint\.weights starts a run from it"):
        Checkpoints(Trainer(resume, Mesh({}), torch.device("cpu")), "digest")


@pytest.fixture
def command(tmp_path, text, capsys):
    """command("train.steps=4", ...) -> output and error of a run of one layer; its problems where it is refused."""
    keys = {"data.path": text, "data.cache": tmp_path / "cache", "record.folder": tmp_path, "model.layers": 1}
    words = ["experiments/configs/tiny.yaml", *(f"{k}={v}" for k, v in keys.items())]

    def run(*more):
        try:
            assert run_command.train([*words, *more], None) == 0
        except ConfigError as error:
            return "", "\n".join(map(str, error.problems))
        return capsys.readouterr()

    return run


def test_a_run_says_why_it_starts_afresh(command, tmp_path):
    words = ("checkpoint.resume=auto", "checkpoint.every=1", "train.steps=2")
    _, told = command(*words)
    assert told == f"starts afresh: {tmp_path}/checkpoints/{one_name(tmp_path)} holds no complete checkpoint\n"
    first = tmp_path / "checkpoints" / one_name(tmp_path)
    rule = f"the checkpoints in {first} are of another run; keys that differ: "
    _, told = command(*words[:2], "train.steps=3", "record.arm=x")
    assert "holds no complete checkpoint" in told  # an arm is told of itself alone
    assert command(*words[:2], "train.steps=3")[1] == f"starts afresh: {rule}train.steps 2 -> 3\n"
    refused = command(*words[1:], "train.lr=0.5", "dp.degree=2", "checkpoint.resume=latest")[1]
    legal = "the folder of a checkpoint or of a run, or auto"
    differ = "dp.degree 1 -> 2, train.lr 0.003 -> 0.5"
    assert refused == f"checkpoint.resume=latest cannot be followed: {rule}{differ}; legal: {legal}"
    out, told = command(*words[:2], "train.steps=4", f"checkpoint.weights={first}")
    assert told.splitlines()[1] == f"starts from {first}/step-00000002" and "keys that differ: train.steps" in told
    assert "resumed" not in out


def test_a_file_that_changed_sets_a_run_apart(tmp_path):
    """Its path has not; a checkpoint beside it that cannot be read, and one that differs more, are passed over."""
    (tmp_path / "lists.csv").write_text("one")
    config = replace(RunConfig(), {"record.folder": f"{tmp_path}", "pp.schedule": f"file:{tmp_path}/lists.csv"})
    others = [config, replace(config, {"train.lr": 0.5}), replace(config, {"train.clip": 0.5})]
    written = [folder_of(c) for c in others]
    for folder, other in zip(written, others, strict=True):
        write_weights(folder / "step-00000001", named(1).items(), to_mapping(other))
    (written[2] / "step-00000001" / "index.json").write_text("")
    (tmp_path / "lists.csv").write_text("two")
    asked = replace(config, {"checkpoint.resume": "auto"})
    rule = (
        f"the checkpoints in {written[0]} are of another run; keys that differ: none, but a file that one of them names"
    )
    assert list(told_start(asked, None, None)) == [f"starts afresh: {rule}"]


def one_name(folder):
    (row,) = (folder / "rows").glob("run-*.json")
    return row.stem


def test_a_damaged_checkpoint_is_named_before_anything_else(command, tmp_path):
    """Also where it would have no step left to make."""
    words = ("checkpoint.every=1", "train.steps=2", f"checkpoint.folder={tmp_path}/c", "checkpoint.resume=auto")
    command(*words)
    last, before = tmp_path / "c" / "step-00000002", tmp_path / "c" / "step-00000001"
    assert command(*words)[1] == f"train.steps=2 are made already in {last}; legal: more than 2"
    path = next(last.glob("*-rest.safetensors"))
    whole = path.read_bytes()
    for content, told in ((whole[:-1], "bytes instead of"), (whole[:-1] + b"x", "was altered")):
        path.write_bytes(content)
        for steps in ("2", "3"):
            key, *lines = command(*words, f"train.steps={steps}")[1].splitlines()
            assert key == f"checkpoint.resume=auto cannot be followed: {last} is damaged:"
            assert len(lines) == 1 and lines[0].startswith(f"  - {path} ") and told in lines[0]
            assert lines[0].endswith(f"; the complete checkpoint before it is {before}")
    (last / "index.json").write_text("{")
    cut = f"cannot be followed: {last} is damaged:\n  - {last}/index.json is truncated or was altered; the complete "
    cut += f"checkpoint before it is {before}"
    assert command(*words)[1] == f"checkpoint.resume=auto {cut}"
    weights = f"checkpoint.weights={tmp_path}/c"
    assert command("train.steps=3", weights)[1] == f"{weights} {cut}"
    with pytest.raises(CheckpointError) as caught:
        StoredWeights(tmp_path / "c", verify=False)
    assert str(caught.value) == cut.removeprefix("cannot be followed: ")


def test_a_run_of_few_steps_has_no_speed(command):
    out, _ = command("train.steps=3")
    assert "\ntoo few steps to time: record.warmup_steps are left out\n" in out and "nan" not in out


def test_the_command_goes_on_in_another_layout(configure, tmp_path, capsys):
    """What the README shows."""
    keys = {"data.path": tmp_path / "text.txt", "data.cache": tmp_path / "cache", "record.folder": tmp_path}
    words = ["experiments/configs/tiny.yaml", *(f"{k}={v}" for k, v in keys.items()), "train.steps=4", "model.layers=1"]
    assert run_command.train([*words, "checkpoint.every=2", "dp.degree=2"], None) == 0
    (first,) = (tmp_path / "checkpoints").iterdir()
    said = capsys.readouterr().out
    assert f"checkpoint {first}/step-00000004\n" in said and "resumed" not in said
    with pytest.raises(ConfigError, match=r"checkpoint.every=2 would write among"):
        run_command.train([*words, "checkpoint.every=2", "dp.degree=2"], None)
    with pytest.raises(ConfigError, match=r"train.steps=4 are made already in .*; legal: more than 4"):
        run_command.train([*words, "checkpoint.every=2", "dp.degree=2", "checkpoint.resume=latest"], None)
    more = [*words, "train.steps=6", "dp.degree=3", f"checkpoint.resume={first}"]
    assert run_command.train(more, None) == 0
    out, error = capsys.readouterr()
    assert f"resumed after step 4 from {first}/step-00000004\n" in out
    assert error.startswith(f"starts from {first}/step-00000004\n  train.steps=6 was 4\n")
    stored = StoredWeights(first)
    assert max(float(t.double().norm()) for _, t in stored) > TOLERANCE
    assert read_index(newest(first)).state["config"]["dp"]["degree"] == 2
