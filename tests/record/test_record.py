"""Rows are whole or absent, none is lost, a row that does not fit is told, and an id stands for what is computed."""

import dataclasses
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from research import config as configs
from research import record, settings
from research.config import RunConfig, Scalar
from research.record import Row, config_hash, identity_of, load, read, row_path, run_id, select, write
from research.settings import to_mapping

TEMPLATE = read(Path(__file__).parents[1] / "report" / "row.json")
DEFAULTS = {f"{s}.{k}": v for s, keys in settings.to_mapping(RunConfig()).items() for k, v in keys.items()}


def row(identity: str, **fields: object) -> Row:
    return dataclasses.replace(TEMPLATE, run_id=identity, **fields)  # type: ignore[arg-type]


def forked(body: Callable[[], object]) -> int:
    """The process that runs `body`."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            body()
            status = 0
        finally:
            os._exit(status)
    return pid


def exit_status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_what_is_written_is_read(tmp_path: Path) -> None:
    first, second = row("a", loss=2.5, losses=[3.0, 2.5]), row("a", loss=float("nan"), losses=[])
    assert write(first, tmp_path / "deep" / "results") == tmp_path / "deep" / "results" / "rows" / "a.json"
    assert load(tmp_path / "deep" / "results") == [first]
    write(second, tmp_path)
    write(first, tmp_path)
    assert load(tmp_path) == [first]
    assert load(tmp_path / "nowhere") == []


@pytest.mark.parametrize("step", ["fsync", "chmod", "replace"])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_interrupted_write_leaves_the_old_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: type[BaseException]
) -> None:
    def interrupted(*args: object) -> None:
        raise error

    write(row("a", loss=1.0), tmp_path)
    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(os if step == "fsync" else Path, step, interrupted)
        write(row("a", loss=2.0), tmp_path)
    assert [r.loss for r in load(tmp_path)] == [1.0]
    assert [p.name for p in (tmp_path / "rows").iterdir()] == ["a.json"]


@pytest.mark.parametrize("step", ["fsync", "chmod", "replace"])
def test_a_crash_leaves_the_old_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    write(row("a", loss=1.0), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os if step == "fsync" else Path, step, lambda *args: os.kill(os.getpid(), signal.SIGKILL))
        assert exit_status(forked(lambda: write(row("a", loss=2.0), tmp_path))) == -signal.SIGKILL
    assert [r.loss for r in load(tmp_path)] == [1.0]
    write(row("a", loss=3.0), tmp_path)
    assert [r.loss for r in load(tmp_path)] == [3.0]


@pytest.mark.timeout(30)
def test_many_writers_lose_nothing(tmp_path: Path) -> None:
    """8 processes write 20 rows of their own, and all write one that they share, while another reads."""

    def writes(process: int) -> None:
        for number in range(20):
            write(row(f"own-{process}-{number}", seed=process, tokens=number), tmp_path)
            write(row("shared", losses=[float(process)] * 500), tmp_path)

    def reads() -> None:
        for _ in range(40):
            assert all(len(set(r.losses)) == 1 for r in load(tmp_path) if r.run_id == "shared")

    processes = [*(forked(lambda p=p: writes(p)) for p in range(8)), forked(reads)]
    assert [exit_status(pid) for pid in processes] == [0] * 9
    rows = load(tmp_path)
    own = {(r.run_id, r.seed, r.tokens) for r in rows if r.run_id != "shared"}
    assert own == {(f"own-{p}-{n}", p, n) for p in range(8) for n in range(20)}
    assert len(rows) == 161 == len(list((tmp_path / "rows").iterdir()))


WHOLE = json.dumps(dataclasses.asdict(TEMPLATE))


def test_a_schedule_of_a_file_is_what_stands_there(tmp_path: Path) -> None:
    """Another list of actions is another run; the same one in another place is the same."""
    names = []
    for place, actions in (("a.csv", "F0,B0"), ("b.csv", "F0,B0"), ("a.csv", "F0,F1,B0,B1")):
        (tmp_path / place).write_text(actions)
        names.append(run_id(configs.replace(RunConfig(), {"pp.schedule": f"file:{tmp_path / place}"})))
    assert names[0] == names[1] != names[2]


def changed(without: str = "", **fields: object) -> str:
    tree = json.loads(WHOLE) | fields
    tree.pop(without, None)
    return json.dumps(tree)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is no row"),
        (WHOLE[: len(WHOLE) // 2], "is no row"),
        (WHOLE + WHOLE, "is no row"),
        (b"\xff\xfe", "is no row"),
        ("[]", "is no Row: missing ['ablation'"),
        ("3", "is no Row: missing"),
        (changed(without="loss"), "is no Row: missing ['loss'], unknown []"),
        (changed(speed=3, colour=4), "is no Row: missing [], unknown ['colour', 'speed']"),
        (changed(without="loss", lost=3), "is no Row: missing ['loss'], unknown ['lost']"),
        (
            changed(hardware={"device": "cpu"}),
            "is no Hardware: missing ['nodes', 'python', 'ranks'",
        ),
        (changed(hardware=None), "is no Hardware: missing"),
    ],
)
def test_a_row_that_does_not_fit_is_told_by_file_and_field(tmp_path: Path, text: str | bytes, told: str) -> None:
    write(row("a"), tmp_path)
    path = row_path(tmp_path, "b")
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    for reading in (lambda: read(path), lambda: load(tmp_path)):
        with pytest.raises(ValueError) as caught:
            reading()
        assert str(caught.value).startswith(f"{path} {told}")


def other(key: str, value: Scalar) -> Scalar:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, (int, float)) else f"{value}x"


@pytest.mark.parametrize("key", DEFAULTS)
def test_an_id_changes_with_what_is_computed(key: str) -> None:
    config = RunConfig()
    place_or_name = ("record.folder", "data.cache")
    watching = ("record.tensorboard", "record.profile", "launch.timeout_s")
    keeping = ("checkpoint.every", "checkpoint.folder", "checkpoint.keep", "checkpoint.keep_every")
    same = run_id(config) == run_id(configs.replace(config, {key: other(key, DEFAULTS[key])}))
    assert same == (key in place_or_name + watching + keeping or key.startswith(("slurm.", "generate.")))


def test_an_id_tells_what_is_computed_from_whose_it_is() -> None:
    """Names and numbers of repetitions stand in the id, and leave the hash alone."""
    config = configs.replace(RunConfig(), {"record.ablation": "axes", "record.arm": "dp2", "record.repeat": 2})
    assert config_hash(to_mapping(config)) == config_hash(to_mapping(RunConfig()))
    assert run_id(config) == f"axes-dp2-s0-r2-{config_hash(to_mapping(config))}"


def test_a_run_that_goes_on_is_the_same_run() -> None:
    def hashed(resume: str) -> str:
        return config_hash(to_mapping(configs.replace(RunConfig(), {"checkpoint.resume": resume})))

    assert hashed("latest") == hashed("auto") == hashed("") != hashed("some/folder")


def test_an_id_says_ablation_arm_and_seed() -> None:
    config = settings.load(None, ["record.ablation=axes", "record.arm=dp2", "train.seed=3"])
    parts = run_id(config).split("-")
    assert parts[:3] == ["axes", "dp2", "s3"] and len(parts[3]) == 8
    assert run_id(RunConfig()).startswith("run-s0-")


def test_an_id_is_the_same_for_the_config_that_a_row_stores() -> None:
    for words in ([], ["train.lr=1"], ["train.lr=1.0e-4", "dp.degree=2"], ["train.clip=3"]):
        config = settings.load(None, words)
        stored = json.loads(json.dumps(settings.to_mapping(config)))
        assert run_id(settings.from_mapping(stored)) == run_id(config)
    assert run_id(settings.load(None, ["train.lr=1"])) == run_id(settings.load(None, ["train.lr=1.0"]))


@pytest.mark.parametrize("key", record.LATER)
def test_an_id_is_that_of_a_row_from_before_a_key(key: str) -> None:
    section, leaf = key.split(".")
    before, today = to_mapping(RunConfig()), to_mapping(RunConfig())
    assert today[section][leaf] == record.LATER[key]
    del before[section][leaf]
    assert config_hash(before) == config_hash(today) and identity_of(before) == identity_of(today)


def test_select_by_plain_attributes() -> None:
    rows = [row(f"{a}{s}", arm=a, seed=s, kind=k) for a in "ab" for s in (0, 1) for k in ("measured", "dry")]
    assert [r.run_id for r in select(rows, arm="a", kind="dry")] == ["a0", "a1"]
    assert list(select(rows)) == rows and list(select(rows, arm="c")) == []
    with pytest.raises(AttributeError):
        list(select(rows, colour="red"))


@pytest.mark.parametrize("folder", ["results", "a/b/c", ".", ""])
def test_a_folder_that_can_be_made_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert list(record.problems(configs.replace(RunConfig(), {"record.folder": folder}))) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["file", "file/deeper", "results", "a" * 300 + "/b"])
def test_a_folder_that_would_lose_the_row_is_told_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "rows").touch()
    (problem,) = record.problems(configs.replace(RunConfig(), {"record.folder": folder}))
    assert problem.key == "record.folder"


def test_a_folder_without_leave_to_write_is_told_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    (problem,) = record.problems(configs.replace(RunConfig(), {"record.folder": str(tmp_path / "results")}))
    assert problem.rule == "cannot be written to"


@pytest.mark.parametrize("key", ["record.ablation", "record.arm"])
@pytest.mark.parametrize(
    ("name", "good"),
    [("tp=2, ep=4 (v1.5)", True), ("a/b", False), ("a\0", False), ("a" * 61, False), ("a|b", False), ("a\nb", False)],
)
def test_a_name_is_part_of_a_file_name(tmp_path: Path, key: str, name: str, good: bool) -> None:
    config = configs.replace(RunConfig(), {key: name})
    assert [p.key for p in record.problems(config)] == ([] if good else [key])
    if good:
        write(row(run_id(config)), tmp_path)
        assert [r.run_id for r in load(tmp_path)] == [run_id(config)]


def test_numbers_that_json_does_not_know_come_back(tmp_path: Path) -> None:
    """A run that skipped steps has norms that are none; every reader of JSON can read its row."""
    odd = dataclasses.replace(row("a"), loss=float("nan"), grad_norms=[1.0, float("inf"), float("nan")], mfu=None)
    odd = dataclasses.replace(odd, mtp_losses=[[2.0, float("nan")]])
    path = write(odd, tmp_path)
    json.loads(path.read_text(), parse_constant=pytest.fail)
    back = read(path)
    assert back.loss != back.loss and back.mfu is None
    assert back.mtp_losses[0][0] == 2.0 and back.mtp_losses[0][1] != back.mtp_losses[0][1]
    assert back.grad_norms[0] == 1.0 and all(n != n for n in back.grad_norms[1:])


def test_a_run_that_was_all_warm_up_tells_no_speed() -> None:
    assert row("a", tokens_per_s=1234.5).speed == "1,234 tokens/s"
    short = row("b", tokens_per_s=float("nan"), timed_steps=0)
    assert short.speed == "too few steps to time: record.warmup_steps are left out"
