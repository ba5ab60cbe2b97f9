"""Start ranks on this machine as forked processes, and end them together.

Forking is fast (no second import of torch) and safe while this process has neither run a threaded torch kernel nor
touched CUDA; the entry points and the tests leave all such work to the ranks.
"""

import contextlib
import io
import itertools
import math
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, Generic, TypeVar

import torch

from research.config import LaunchConfig
from research.launch.process import Place, process_group
from research.problems import ConfigError

T = TypeVar("T")
GRACE_S = 1.0  # in which the errors of other ranks may still arrive, so that the first one can be told
NOTICE_S = 0.25  # a silent death may be noticed this much later than the errors that it causes in other ranks


class RankError(RuntimeError):
    """A rank failed. `rank` is the one whose error came first; the message holds its traceback, and who was silent."""

    def __init__(self, rank: int, text: str, silent: Sequence[int] = ()) -> None:
        busy = f" (ranks {list(silent)} were still at work)" if silent else ""
        super().__init__(f"rank {rank} failed first{busy}:\n{text.rstrip()}")
        self.rank = rank


@dataclass(frozen=True)
class _Report(Generic[T]):
    rank: int
    at: float
    value: T | None = None
    error: str | None = None
    config: ConfigError | None = None  # the error, where a user rather than a programmer can mend it


def start(
    function: Callable[[Place, torch.device], T],
    world: int,
    config: LaunchConfig,
    limit_s: float | None = None,
    heeds: bool = False,
) -> list[T]:
    """Run `function(place, device)` on `world` ranks of this machine; returns what each returned, by rank.

    The first rank that raises, is killed or leaves ends all others: RankError with its traceback, or the ConfigError
    itself. Past `limit_s`
    seconds in all, TimeoutError names the ranks that are still at work. No process is left in any case. Where the
    ranks heed notices (`preemption`), a first SIGTERM is passed on and they end by themselves; SIGUSR1 always is.
    """
    return start_each([function], world, config, limit_s, heeds)[0]


def start_each(
    functions: Sequence[Callable[[Place, torch.device], T]],
    world: int,
    config: LaunchConfig,
    limit_s: float | None = None,
    heeds: bool = False,
) -> list[list[T]]:
    """As `start`, each function on `world` ranks of its own, all at the same time: groups that know nothing of each
    other, and end together."""
    if torch.get_num_threads() != 1:
        raise RuntimeError(
            "ranks are forked, which deadlocks once this process has run a threaded kernel: call "
            "torch.set_num_threads(1) before anything is computed here, or run the entry point as a process of its own"
        )
    context = get_context("fork")
    ranks: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, _terminable(ranks, heeds):
        alive_read, alive_write = os.pipe()
        pipes: list[Connection] = []
        try:
            for group, rank in itertools.product(range(len(functions)), range(world)):
                ours, theirs = context.Pipe(duplex=False)
                place, meeting = Place(rank, world, rank, world), f"file://{folder}/rendezvous-{group}"
                arguments = (functions[group], place, config, meeting, theirs, alive_read, alive_write)
                process = context.Process(target=_rank, args=arguments, name=f"rank {rank}", daemon=True)
                process.start()
                theirs.close()
                pipes.append(ours)
                ranks.append(process)
            values = _collect(ranks, pipes, limit_s, config.backend_timeout_s)
            end = time.monotonic() + GRACE_S
            for process in ranks:
                process.join(max(0.0, end - time.monotonic()))
            return [values[i : i + world] for i in range(0, len(values), world)]
        finally:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.join()
            for pipe in pipes:
                pipe.close()
            os.close(alive_read)
            os.close(alive_write)


def _rank(
    function: Callable[[Place, torch.device], T],
    place: Place,
    config: LaunchConfig,
    init_method: str,
    pipe: Connection,
    alive_read: int,
    alive_write: int,
) -> None:
    """The life of one forked rank: run, report, leave."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us, so that Ctrl-C prints once
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what a rank printed outlives its violent end
    os.close(alive_write)
    threading.Thread(target=_leave_with_parent, args=(alive_read,), daemon=True).start()

    def leave(error: BaseException | None) -> None:
        """The last word of this rank; an error in any of its threads is one."""
        if error is not None:
            text = "".join(traceback.format_exception(error))
            config = error if isinstance(error, ConfigError) else None
            with contextlib.suppress(OSError):  # after a value nobody listens
                report: _Report[T] = _Report(place.rank, time.time(), error=text, config=config)
                pipe.send_bytes(pickle.dumps(report))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if error is None else 1)  # without the parent's exit handlers

    threading.excepthook = lambda failed: leave(failed.exc_value)
    try:
        with process_group(place, config, init_method) as device:
            value = function(place, device)
            # Before the farewell: a rank that waits there for others has done its work.
            pipe.send_bytes(pickle.dumps(_Report(place.rank, time.time(), value=value)))
    except BaseException as error:
        leave(error)
    leave(None)


def _leave_with_parent(alive_read: int) -> None:
    """The pipe ends when the parent does, however it ended."""
    os.read(alive_read, 1)
    os._exit(1)


def _collect(ranks: list[Any], pipes: list[Connection], limit_s: float | None, farewell_s: float) -> list[Any]:
    """Reports of all ranks. Once one is done, the others must be within `farewell_s`: no collective can wait longer."""
    end = math.inf if limit_s is None else time.monotonic() + limit_s
    why = f"after {limit_s} s"
    reports: dict[int, _Report[Any]] = {}
    while len(reports) < len(ranks):
        failed = any(r.error is not None for r in reports.values())
        if reports and not failed and time.monotonic() + farewell_s < end:
            end, why = time.monotonic() + farewell_s, f"{farewell_s:g} s after ranks {sorted(reports)} were"
        left = GRACE_S if failed else None if end == math.inf else max(0.0, end - time.monotonic())
        open_pipes = {pipes[r]: r for r in range(len(ranks)) if r not in reports}
        since = time.time()
        ready = wait(list(open_pipes), left)
        for pipe in ready:
            rank = open_pipes[pipe]  # type: ignore[index]
            try:
                reports[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except (EOFError, OSError):  # died after the last look, perhaps in the middle of a word
                reports[rank] = _Report(rank, since - NOTICE_S, error=_obituary(ranks[rank]))
        if failed and not ready:
            break
        if not ready:
            raise TimeoutError(f"ranks {sorted(open_pipes.values())} of {len(ranks)} are not done {why}")
    errors = [r for r in reports.values() if r.error is not None]
    if errors:
        first = min(errors, key=lambda r: r.at)
        if first.config is not None:
            raise first.config
        raise RankError(first.rank, first.error or "", sorted(set(range(len(ranks))) - set(reports)))
    return [reports[r].value for r in range(len(ranks))]


def _obituary(process: Any) -> str:
    process.join(GRACE_S)
    code = process.exitcode
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"left without a word, exit code {code}"


@contextlib.contextmanager
def _terminable(ranks: Sequence[Any], heeds: bool) -> Iterator[None]:
    """SIGTERM unwinds this process like Ctrl-C, so that the ranks are ended, or are asked to end where they heed it;
    handlers belong to the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    parent, passed_on = os.getpid(), [signal.SIGUSR1, *([signal.SIGTERM] if heeds else [])]

    def leave(number: int, frame: FrameType | None) -> None:
        if os.getpid() != parent:
            return  # a rank that has just been forked
        if number not in passed_on:
            raise SystemExit(128 + number)
        if number == signal.SIGTERM:
            passed_on.remove(signal.SIGTERM)  # a second one is meant
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, number)

    before = {n: signal.signal(n, leave) for n in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
