"""Run one arm as a process of its own, and keep its attempt true to what happens to it."""

import ctypes
import dataclasses
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from research.attempts import Attempt, claimed, failure_of, forget_try, now, progress_of, read, write
from research.record import row_path
from research.sweep.evidence import End, judge, last_error, oom_kills
from research.sweep.scheduler import Unreachable, records

ENDING = (signal.SIGINT, signal.SIGTERM)
TICK_S = 0.2
GRACE_S = 30.0  # for a run that was asked to end, which may have to save
PR_SET_PDEATHSIG = 1


class Notice:
    """Inside `with`, Ctrl-C and SIGTERM are noted, and raised where `check` is called: never amid a write."""

    def __enter__(self) -> "Notice":
        self._came = 0
        self._before = {number: signal.signal(number, self._note) for number in ENDING}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = number

    def check(self) -> None:
        if self._came == signal.SIGINT:
            raise KeyboardInterrupt
        if self._came:
            raise SystemExit(128 + self._came)


def keep(
    folder: Path,
    command: Sequence[str],
    job: str = "",
    seen: int | None = None,
    tick: Callable[[], None] = lambda: None,
    before: Callable[[], None] = lambda: None,
) -> Attempt | None:
    """Run `command`, which is to write the row of the attempt in `folder`, within its time limit. Returns the attempt
    as it ended; None where another process is at it. What has its row is not run again, nor what somebody has tried
    since it was `seen` to have so many tries.

    `before` is called when it is sure that the run starts, and that nobody else is at it; `tick` now and then, and an
    exception in it, such as Ctrl-C, ends the run and is raised again.
    """
    with claimed(folder) as lock:
        if lock is None:
            return None
        attempt = read(folder)
        assert attempt is not None, f"{folder} holds no attempt"
        if has_row(attempt, folder):
            return _written(dataclasses.replace(attempt, state="done", evidence="row written"), folder)
        if seen is not None and attempt.tries > seen:
            return attempt
        forget_try(folder)
        before()
        tries, host = attempt.tries + 1, socket.gethostname()
        attempt = dataclasses.replace(attempt, state="running", evidence="", error="", tries=tries, host=host, job=job)
        attempt = _written(dataclasses.replace(attempt, started=now(), ended=""), folder)
        return _watched(attempt, folder, command, lock, 0 if job else _minutes(attempt), tick)


def _watched(
    attempt: Attempt, folder: Path, command: Sequence[str], lock: int, minutes: float, tick: Callable[[], None]
) -> Attempt:
    killed_before, late, asked = oom_kills(), False, ""
    with (folder / "output.txt").open("wb") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[lock],
            preexec_fn=_end_with_parent,
        )
    end_s = time.monotonic() + minutes * 60 if minutes else float("inf")
    try:
        while child.poll() is None and not late:
            tick()
            time.sleep(TICK_S)
            late = time.monotonic() > end_s
    except BaseException as error:
        asked = "SIGINT" if isinstance(error, KeyboardInterrupt) else "SIGTERM"
        raise
    finally:
        _end(child)
        kills = None if killed_before is None else (oom_kills() or 0) - killed_before
        failure, progress = failure_of(folder), progress_of(folder)
        end = End(
            code=child.returncode,
            has_row=has_row(attempt, folder),
            error=failure.line if failure else last_error(folder / "output.txt") if child.returncode else "",
            limit_minutes=minutes if late else 0,
            asked=asked,
            saved_step=progress.step if progress.saved else 0,
            oom_kills=kills,
        )
        attempt = _written(_judged(attempt, end), folder)
    return attempt


def _minutes(attempt: Attempt) -> float:
    """The time limit; 0: none. The scheduler keeps to its own."""
    return float(str(attempt.config["slurm"]["minutes"]))


def _judged(attempt: Attempt, end: End) -> Attempt:
    """In a job that is ending, it is for the scheduler to say why; one that has saved is in the queue again."""
    state, evidence = judge(end)
    error = "" if state == "done" else end.error
    if attempt.job and state != "done" and (end.saved_step or _ending(attempt.job)):
        return dataclasses.replace(attempt, evidence=evidence, error=error)
    return dataclasses.replace(attempt, state=state, evidence=evidence, error=error, ended=now())


def _ending(job: str) -> bool:
    try:
        record = records([job]).get(job)
    except Unreachable:
        return False
    return record is not None and record.state != "RUNNING"


def has_row(attempt: Attempt, folder: Path) -> bool:
    return row_path(folder.parent.parent, attempt.run_id).exists()


def _written(attempt: Attempt, folder: Path) -> Attempt:
    write(attempt, folder)
    return attempt


def _end(child: "subprocess.Popen[bytes]") -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _end_with_parent() -> None:
    """In the child: a sweep that is killed takes its run along (Linux)."""
    if hasattr(signal, "SIGKILL") and os.uname().sysname == "Linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
