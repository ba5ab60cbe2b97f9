"""What Slurm says of jobs, by stand-ins that print what the real ones printed, and states that follow from it."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from research import attempts, settings
from research.attempts import Attempt
from research.config import RunConfig
from research.sweep import array
from research.sweep.array import arrays, send
from research.sweep.scheduler import Record, Unreachable, records, requeue, submit
from research.sweep.state import standing, to_do

SHOWN = """\
JobId=14 ArrayJobId=12 ArrayTaskId=1 JobName=axes JobState=RUNNING Reason=None ExitCode=0:0 RunTime=00:00:03
JobId=13 ArrayJobId=12 ArrayTaskId=0 JobName=axes JobState=TIMEOUT Reason=TimeLimit ExitCode=0:15 RunTime=00:10:00
JobId=12 ArrayJobId=12 ArrayTaskId=2-3,5%2 JobName=axes JobState=PENDING Reason=JobArrayTaskLimit ExitCode=0:0
"""
Tools = Callable[..., None]


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    """Commands that print what is given, or with `!` before it fail so; those that are not given do not exist."""

    def make(**commands: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for name, text in commands.items():
            (folder / f"{name}.txt").write_text(text.lstrip("!"))
            end = f"cat {folder}/{name}.txt >&2; exit 1" if text.startswith("!") else f"cat {folder}/{name}.txt"
            (folder / name).write_text(f'#!/bin/sh\necho "$@" >>{folder}/{name}.log\n{end}\n')
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin" if commands else str(folder))

    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return make


def asked(folder: Path, name: str) -> list[str]:
    path = folder / "bin" / f"{name}.log"
    return path.read_text().splitlines() if path.exists() else []


def test_records_of_jobs_and_of_elements(tools: Tools, tmp_path: Path) -> None:
    tools(scontrol=SHOWN, sacct="12_9|CANCELLED by 1000|0:0\n12_8|OUT_OF_MEMORY|0:125\n")
    found = records(["12_0", "12_1", "12_3", "12_5", "12_8", "12_9", "12_7"])
    assert {job: r.as_state for job, r in found.items()} == {
        "12_0": "timed out",
        "12_1": "running",
        "12_3": "pending",
        "12_5": "pending",
        "12_8": "out of memory",
        "12_9": "cancelled",
    }
    assert str(found["12_0"]) == "scontrol: TIMEOUT, exit code 0:15, TimeLimit"
    assert str(found["12_8"]) == "sacct: OUT_OF_MEMORY, exit code 0:125"
    assert len(asked(tmp_path, "scontrol")) == 1 and "12_7,12_8,12_9" in asked(tmp_path, "sacct")[0]


@pytest.mark.parametrize("state", ["FAILED", "COMPLETED", "NODE_FAIL", "BOOT_FAIL", "SOMETHING_NEW"])
def test_what_left_no_row_has_failed(state: str) -> None:
    assert Record(state).as_state == "failed"


def test_a_job_that_is_forgotten_and_a_controller_that_is_away(tools: Tools) -> None:
    tools(scontrol="!slurm_load_jobs error: Invalid job id specified", sacct="!accounting storage is disabled")
    assert records(["12_0"]) == {}
    tools(scontrol="!slurm_load_jobs error: Unable to contact slurm controller")
    with pytest.raises(Unreachable, match="Unable to contact"):
        records(["12_0"])


def test_without_slurm_nothing_is_known(tools: Tools) -> None:
    tools()
    with pytest.raises(Unreachable, match="scontrol"):
        records(["12_0"])
    with pytest.raises(Unreachable, match="sbatch"):
        submit([], "x", [])


def test_what_sbatch_refuses_is_told(tools: Tools) -> None:
    tools(sbatch="!sbatch: error: invalid partition specified: gpu")
    with pytest.raises(Unreachable, match="invalid partition"):
        submit(["--partition=gpu"], "x", [])
    tools(sbatch="41;cluster\n")
    assert submit([], "x", []) == "41"


@pytest.mark.parametrize(
    ("state", "told", "done"),
    [
        ("RUNNING", "is queued again", True),
        ("COMPLETING", "is not queued again", False),
        (None, "is not queued", False),
    ],
)
def test_only_what_still_runs_is_queued_again(tools: Tools, tmp_path: Path, state: str, told: str, done: bool) -> None:
    tools(scontrol=f"JobId=7 JobState={state} Reason=None" if state else "!Invalid job id specified")
    assert told in requeue("7")
    assert ("requeue 7" in asked(tmp_path, "scontrol")) == done


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return settings.load(None, ["record.ablation=axes", "record.arm=one", f"record.folder={tmp_path / 'results'}"])


def stands(config: RunConfig, **fields: object) -> Attempt:
    folder = attempts.folder_of(config)
    attempts.write(dataclasses.replace(attempts.new(config), **fields), folder)  # type: ignore[arg-type]
    (found,) = standing([config]).values()
    assert attempts.read(folder) == found
    return found


@pytest.mark.parametrize(
    ("shown", "state", "again"),
    [
        ("JobState=PENDING Reason=Priority", "pending", False),
        ("JobState=RUNNING Reason=None", "running", False),
        ("JobState=TIMEOUT Reason=TimeLimit", "timed out", False),
        ("JobState=OUT_OF_MEMORY Reason=None", "out of memory", False),
        ("JobState=CANCELLED Reason=None", "cancelled", True),
        ("JobState=COMPLETED Reason=None", "failed", False),
        ("JobState=NODE_FAIL Reason=None", "failed", False),
        ("!Invalid job id specified", "cancelled", True),
    ],
)
@pytest.mark.parametrize("last", ["pending", "running"])
def test_jobs_that_cannot_speak_are_asked_for(
    tools: Tools, config: RunConfig, shown: str, state: str, again: bool, last: str
) -> None:
    line = shown if shown.startswith("!") else f"JobId=13 ArrayJobId=12 ArrayTaskId=0 {shown} ExitCode=0:0"
    tools(scontrol=line, sacct="!disabled")
    found = stands(config, state=last, job="12_0", tries=1)
    assert (found.state, bool(found.ended)) == (state, state not in ("pending", "running"))
    assert found.evidence.startswith("scontrol: " if "JobState" in line else "Slurm knows nothing of job 12_0")
    assert list(to_do([config], {found.run_id: found})) == ([config] if again else [])


def test_what_cannot_be_asked_stays_as_it_was(tools: Tools, config: RunConfig) -> None:
    tools()
    assert stands(config, state="running", job="12_0").state == "running"
    assert stands(config, state="timed out", job="12_0", evidence="e").state == "timed out"


def test_a_run_without_a_process_is_cancelled_and_one_with_is_not(tools: Tools, config: RunConfig) -> None:
    with attempts.claimed(attempts.folder_of(config)) as mine:
        assert mine is not None
        assert stands(config, state="running", host="here").state == "running"
        with attempts.claimed(attempts.folder_of(config)) as second:
            assert second is None
    found = stands(config, state="running", host="here")
    assert (found.state, found.evidence) == ("cancelled", "its processes on here ended without a word")


def test_arrays_hold_runs_that_ask_alike(config: RunConfig, tmp_path: Path) -> None:
    def options(*words: str) -> tuple[str, ...]:
        changed = settings.load(None, [*settings.to_words(config), *words])
        (one,) = arrays([changed])
        return one.options

    folder = f"{tmp_path / 'results'}/attempts/slurm-%A_%a.out"
    end = (f"--output={folder}", "--requeue", "--open-mode=append")
    plain = ("--array=0-0", "--job-name=axes", "--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=1")
    assert options() == (*plain, *end)
    asks = ["slurm.partition=gpu", "slurm.account=lab", "slurm.qos=high", "slurm.minutes=90", "slurm.cpus=8"]
    asks += ["slurm.nodes=2", "dp.degree=8", "launch.device=cuda", "checkpoint.every=5", "slurm.notice_s=60"]
    assert options(*asks, "slurm.options=[--constraint=h100,--exclusive]") == (
        *("--array=0-0", "--job-name=axes", "--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=8"),
        *("--gpus-per-node=4", "--partition=gpu", "--account=lab", "--qos=high", "--time=90", "--signal=USR1@60"),
        *(*end, "--constraint=h100", "--exclusive"),
    )
    runs = [settings.load(None, [*settings.to_words(config), f"train.seed={s}", "slurm.at_once=2"]) for s in range(3)]
    big = settings.load(None, [*settings.to_words(config), "dp.degree=2"])
    made = arrays([runs[0], big, *runs[1:]])
    assert [(len(a.runs), a.options[0]) for a in made] == [(3, "--array=0-2%2"), (1, "--array=0-0")]


def test_a_layout_that_no_job_can_hold_is_told(config: RunConfig) -> None:
    odd = settings.load(None, [*settings.to_words(config), "dp.degree=4", "slurm.nodes=3"])
    (problem,) = array.problems(odd)
    assert str(problem) == "slurm.nodes=3 must divide the 4 ranks of the run; legal: 1, 2, 4"


def test_an_array_is_sent_outside_the_root_of_the_repository_never(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (problem,) = array.problems(config)
    assert problem.key == "slurm/ablate.sbatch" and "--submit from the root of the repository" in str(problem)


def test_sending_says_which_job_each_run_is(tools: Tools, config: RunConfig, tmp_path: Path) -> None:
    tools(sbatch="77\n", scontrol="JobId=77 ArrayJobId=77 ArrayTaskId=0-1 JobState=PENDING Reason=None ExitCode=0:0")
    runs = [settings.load(None, [*settings.to_words(config), f"train.seed={s}"]) for s in range(2)]
    (one,) = arrays(runs)
    assert send(one) == ["77_0", "77_1"]
    folders = [str(attempts.folder_of(c)) for c in runs]
    (line,) = asked(tmp_path, "sbatch")
    assert line.startswith("--parsable --array=0-1 ") and line.endswith(
        " ".join(["slurm/ablate.sbatch srun", *folders])
    )
    stand = standing(runs)
    assert [a.state for a in stand.values()] == ["pending"] * 2 and list(to_do(runs, stand)) == []
    assert os.environ["PATH"].startswith(str(tmp_path))
