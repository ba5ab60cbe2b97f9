"""`python -m experiments.ablate`: what is missing and only that, once, and an exit status that tells failures."""

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments import ablate, tables
from research import attempts
from research.record import load
from research.sweep import keep as keeping

Command = Callable[..., tuple[int, list[str]]]


def states(folder: Path) -> dict[str, str]:
    return {a.arm: a.state for a in attempts.load(folder / "results")}


def test_only_what_is_missing_runs(ablation, command: Command, tmp_path: Path, capsys) -> None:
    assert command(ablation(seeds=[0, 1])) == (0, ["one0", "one1", "two0", "two1"])
    assert "4 runs, 0 have their row, 4 to do" in capsys.readouterr().out
    assert command(ablation(seeds=[0, 1])) == (0, [])
    assert "4 runs, 4 have their row, 0 to do" in capsys.readouterr().out
    next(p for p in (tmp_path / "results" / "rows").iterdir() if "-two-s1-" in p.name).unlink()
    assert command(ablation(seeds=[0, 1])) == (0, ["two1"])
    assert command(ablation(seeds=[0, 1], arms={"one": [], "new": ["model.ffn=8"]})) == (0, ["new0", "new1"])
    assert command(ablation(), "train.lr=0.5") == (0, ["one0", "two0"])


def test_repetitions_run_and_are_counted(ablation, command: Command, capsys) -> None:
    assert command(ablation(repeats=2)) == (0, ["one0", "one0", "two0", "two0"])
    assert command(ablation(repeats=3)) == (0, ["one0", "two0"])
    assert "3 |        2.5000" in capsys.readouterr().out.replace("3.0000", "2.5000")


def test_what_failed_runs_again_on_demand_only(ablation, command: Command, capsys) -> None:
    path = ablation(arms={"bad1": [], "good": [], "bad2": []})
    assert command(path) == (1, ["bad10", "good0", "bad20"])
    out, err = capsys.readouterr()
    assert "2 of 3 runs failed" in err and "bad1, seed 0: failed: ValueError: bad1 is bad (exit code 1)" in err
    assert "good" in out.partition("3 to do")[2]  # its table
    assert "[1] bad1: failed: ValueError: bad1 is bad (exit code 1)." in out
    assert command(path) == (1, [])  # a failure stays one
    assert command(path, "--retry", "failed") == (1, ["bad10", "bad20"])
    assert command(path, "--retry", "timed-out") == (1, [])


def test_when_all_fail_the_command_fails(ablation, command: Command, capsys) -> None:
    path = ablation(arms={"bad1": [], "bad2": []})
    assert command(path) == (1, ["bad10", "bad20"])
    assert "2 of 2 runs failed" in capsys.readouterr().err
    assert command(path) == (1, [])


def test_some_of_the_arms(ablation, command: Command, capsys) -> None:
    path = ablation(arms={"tp2": [], "tp4": [], "dp2": [], "dp4": []})
    assert command(path, "--only", "tp*,dp4", "--limit", "2") == (0, ["tp20", "tp40"])
    assert "3 runs, 0 have their row, 2 to do" in capsys.readouterr().out
    assert command(path, "--limit", "0") == (0, [])
    assert command(path, "--only=dp*") == (0, ["dp20", "dp40"])
    assert command(path, "--only", "pp2") == (2, []) and "--only=pp2 is no arm" in capsys.readouterr().err
    assert command(path, "--limit", "-1") == (2, []) and "--limit=-1 is out of range" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--retry", "all"), ("--unknown",), ("--limit", "x")])
def test_an_option_that_is_none_ends_the_command(ablation, command: Command, words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as left:
        command(ablation(), *words)
    assert left.value.code == 2


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"arms": {"one": [], "two": ["model.dmi=3"], "three": ["train.lr=x"]}}, ["arm two: model.dmi", "arm three: "]),
        ({"seeds": "x", "question": None}, ["seeds=x is not a list", "question is missing"]),
    ],
)
@pytest.mark.parametrize("option", [(), ("--dry",), ("--submit",)])
def test_nothing_runs_when_something_is_wrong(ablation, command: Command, capsys, entries, told, option) -> None:
    assert command(ablation(**entries), *option) == (2, [])
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("2 problems in the config:") and all(part in err for part in told)


def test_a_dry_look_runs_nothing_and_shows_where_arms_stand(ablation, command: Command, tmp_path, capsys) -> None:
    path = ablation(arms={"one": [], "bad": [], "tp3": ["tp.degree=3"], "two": []}, impossible=["tp3"])
    assert command(path, "--dry") == (0, []) and not (tmp_path / "results" / "attempts").exists()
    out = capsys.readouterr().out
    assert out.count("pending") == 3 and "tp3: impossible: tp.degree=3 must divide model.heads=8" in out
    assert command(path, "--limit", "2") == (1, ["one0", "bad0"])
    capsys.readouterr()
    assert command(path, "--dry") == (0, [])
    lines = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    cells = {c[0]: c[2] for c in ([c.strip() for c in line.strip("│ ").split("│")] for line in lines)}
    assert cells == {"one": "done", "bad": "failed", "two": "pending", "tp3": "impossible"}


def test_tables_made_later_hold_what_the_ablation_wants(ablation, command: Command, tmp_path, capsys) -> None:
    """Order, baseline, why an arm is impossible, and arms that never ran; whoever has the folder has no other file."""
    arms: dict[str, list[str]] = {"two": [], "tp3": ["tp.degree=3"], "one": [], "later": []}
    path = ablation(name="own", arms=arms, impossible=["tp3"], baseline="one")
    assert command(path, "--only", "one,two")[0] == 0
    page = tmp_path / "results" / "tables" / "own.md"
    made = page.read_bytes()
    path.unlink()
    assert tables.main([str(tmp_path / "results")]) == 0 and page.read_bytes() == made
    assert b"over one" in made and b"tp.degree=3 must divide" in made and b"later [2]" in made
    (tmp_path / "results" / "ablations" / "own.json").write_text("{}")
    capsys.readouterr()
    assert tables.main([str(tmp_path / "results")]) == 1 and "is no record of an ablation" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arm", "state", "evidence", "error"),
    [
        ("bad", "failed", "exit code 1", "ValueError: bad is bad"),
        ("memory", "out of memory", "exit code 1, an allocation failed", "MemoryError"),
        ("SIGKILL", "failed", "killed by SIGKILL: no OOM kill was counted", ""),
        ("SIGSEGV", "failed", "killed by SIGSEGV", ""),
        ("quiet", "failed", "exit code 0, but there is no row", ""),
        ("slow", "timed out", "ran past its limit of 0.01 min, killed by SIGTERM", ""),
    ],
)
def test_every_end_leaves_its_state_and_evidence(
    ablation, command: Command, tmp_path, monkeypatch, arm: str, state: str, evidence: str, error: str
) -> None:
    monkeypatch.setattr(keeping, "oom_kills", lambda: 7)
    if arm == "slow":
        monkeypatch.setattr(keeping, "_minutes", lambda attempt: 0.01)
    assert command(ablation(arms={arm: [], "good": []})) == (1, [f"{arm}0", "good0"])
    (found,) = (a for a in attempts.load(tmp_path / "results") if a.arm == arm)
    assert (found.state, found.evidence, found.error) == (state, evidence, error)
    assert found.tries == 1 and found.started and found.ended


def test_a_kill_of_the_kernel_for_want_of_memory(ablation, command: Command, tmp_path, monkeypatch) -> None:
    counts = iter((7, 8))
    monkeypatch.setattr(keeping, "oom_kills", lambda: next(counts))
    assert command(ablation(arms={"SIGKILL": []})) == (1, ["SIGKILL0"])
    (found,) = attempts.load(tmp_path / "results")
    assert found.state == "out of memory" and "the kernel counted 1 OOM kill meanwhile" in found.evidence


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_sweep_that_is_ended_leaves_no_process_and_goes_on(ablation, command: Command, tmp_path, number) -> None:
    path = ablation(arms={"one": [], "slow": [], "two": []})
    pid = forked(lambda: command(path)[0])
    until(lambda: states(tmp_path).get("slow") == "running")
    os.kill(pid, number)
    assert exit_status(pid) == {signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    assert states(tmp_path) == {"one": "done", "slow": "cancelled"}
    assert not running(tmp_path)
    assert command(path, "--only", "one,two") == (0, ["two0"])


def test_a_sweep_that_is_killed_takes_its_run_along_and_goes_on(ablation, command: Command, tmp_path, capsys) -> None:
    path = ablation(arms={"one": [], "slow": [], "two": []})
    pid = forked(lambda: command(path)[0])
    until(lambda: states(tmp_path).get("slow") == "running")
    os.kill(pid, signal.SIGKILL)
    exit_status(pid)
    until(lambda: not running(tmp_path))
    assert states(tmp_path)["slow"] == "running"  # nobody was left to write otherwise
    assert command(path, "--dry") == (0, [])
    assert states(tmp_path)["slow"] == "cancelled" and "1 cancelled, 2 to do" in capsys.readouterr().out
    assert [r.arm for r in load(tmp_path / "results")] == ["one"]


@pytest.mark.timeout(200)
def test_eight_sweeps_at_once_lose_and_repeat_nothing(ablation, command: Command, tmp_path: Path) -> None:
    """Three of them are killed on the way, and one more comes after."""
    arms = {f"steps{i}": [] for i in range(7)} | {"bad": []}
    path = ablation(arms=arms, seeds=[0, 1])
    sweeps = [forked(lambda: command(path)[0]) for _ in range(8)]
    until(lambda: len(list((tmp_path / "results" / "rows").glob("axes-steps*"))) > 3 or len(states(tmp_path)) > 4)
    for pid in sweeps[:3]:
        os.kill(pid, signal.SIGKILL)
    ends = [exit_status(pid) for pid in sweeps]
    assert set(ends[3:]) <= {0, 1}  # 1 where the arm that fails had its turn
    until(lambda: not running(tmp_path))
    assert command(path)[0] == 1
    rows = load(tmp_path / "results")
    wanted = {(arm, seed): 1 for arm in arms if arm != "bad" for seed in (0, 1)}
    assert Counter((r.arm, r.seed) for r in rows) == Counter(wanted)
    starts = Counter((tmp_path / "results" / "starts").read_text().split())
    assert starts.total() - len(rows) - 2 <= 3  # what was running when its sweep was killed


def forked(body: Callable[[], int]) -> int:
    """The process that runs `body`, whose result is its exit status."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            status = body()
        except SystemExit as left:
            status = int(left.code or 0)
        finally:
            os._exit(status)
    return pid


def exit_status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def running(folder: Path) -> list[str]:
    """Processes that run an attempt of this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        found += [words] if "stand_in.py" in words and str(folder) in words else []
    return found


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 100
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.timeout(120)
def test_the_command_in_earnest(ablation, command: Command, tmp_path: Path, text: Path, monkeypatch, capsys) -> None:
    """One arm trains on two ranks and one breaks down in its second step; the second time nothing starts."""
    monkeypatch.setattr(ablate, "RUN", (sys.executable, "-m", "experiments.run"))
    path = ablation(arms={"breaks": ["train.lr=1e300"], "two": ["dp.degree=2"]})
    words = [f"data.path={text}", f"data.cache={tmp_path / 'cache'}", "train.steps=2", "train.warmup_steps=1"]
    for todo in ("2 runs, 0 have their row, 2 to do", "2 runs, 1 have their row, 1 failed, 0 to do"):
        assert command(path, *words, "launch.threads=1")[0] == 1
        out, err = capsys.readouterr()
        assert todo in out and "breaks, seed 0: failed: FloatingPointError: step 1" in err
        assert [(r.arm, r.hardware.ranks) for r in load(tmp_path / "results")] == [("two", 2)]
