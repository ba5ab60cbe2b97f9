"""Ranks that are started here end together: each way to fail, each way to be ended, and nothing is left behind."""

import contextlib
import gc
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from research.config import LaunchConfig
from research.launch import local
from research.launch.local import RankError, start, start_each
from research.launch.process import Place

pytestmark = pytest.mark.timeout(60)
CPU = LaunchConfig(device="cpu", threads=1, timeout_s=30)
SOON_S = 10  # far below any time limit that a rank waits for by itself
Body = Callable[[Place, torch.device], object]


def summed(place: Place, device: torch.device) -> float:
    x = torch.tensor([float(place.rank + 1)], device=device)
    dist.all_reduce(x)
    return x.item()


def noted(folder: Path, body: Body, place: Place, device: torch.device) -> object:
    """`body`, after a note of which process runs it."""
    (folder / "new").mkdir(exist_ok=True)
    note = folder / "new" / f"{place.rank}"
    note.write_text(str(os.getpid()))
    note.rename(folder / f"{place.rank}.pid")
    return body(place, device)


def pids(folder: Path, ranks: int) -> list[int]:
    """Of all ranks, once each has noted its own."""
    end = time.monotonic() + SOON_S
    while len(notes := sorted(folder.glob("*.pid"))) < ranks:
        assert time.monotonic() < end
        time.sleep(0.01)
    return [int(note.read_text()) for note in notes]


def alive(pid: int) -> bool:
    """Whether a process is there and not just a zombie that nobody has asked for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone_soon(processes: list[int]) -> bool:
    end = time.monotonic() + SOON_S
    while any(map(alive, processes)) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(map(alive, processes))


def open_files() -> list[Path]:
    gc.collect()  # an error keeps the processes that it tells of
    return sorted(Path("/proc/self/fd").iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where ranks note which process they are; those that a failed test leaves are ended."""
    yield tmp_path
    for note in tmp_path.glob("*.pid"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(note.read_text()), signal.SIGKILL)


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that hang are ended sooner after a failure than in earnest."""
    monkeypatch.setattr(local, "GRACE_S", 1.2 * local.NOTICE_S)


def leave(how: str) -> None:
    if how == "raise":
        raise ZeroDivisionError("mine")
    if how == "sys.exit":
        sys.exit(4)
    if how == "os._exit":
        os._exit(3)
    os.kill(os.getpid(), getattr(signal, how))


def fails(how: str, victim: int, others: str, place: Place, device: torch.device) -> None:
    dist.barrier()
    if place.rank == victim:
        leave(how)
    if others == "collective":
        summed(place, device)
    elif others == "sleep":
        time.sleep(1000)
    elif others == "busy":
        while True:
            pass


def sleeps(ranks: tuple[int, ...], place: Place, device: torch.device) -> int:
    if place.rank in ranks:
        time.sleep(1000)
    return place.rank


@pytest.mark.parametrize("world", [1, 2, 3])
def test_values_come_back_by_rank(world: int) -> None:
    def body(place: Place, device: torch.device) -> tuple[Place, str, float]:
        return place, device.type, summed(place, device) if world > 1 else 1.0

    total = sum(range(1, world + 1))
    assert start(body, world, CPU) == [(Place(r, world, r, world), "cpu", total) for r in range(world)]


def test_groups_meet_their_own_ranks_alone() -> None:
    def scaled(by: float, place: Place, device: torch.device) -> tuple[Place, float]:
        return place, by * summed(place, device)

    first, second = start_each([partial(scaled, 1.0), partial(scaled, 10.0)], 2, CPU)
    assert first == [(Place(r, 2, r, 2), 3.0) for r in range(2)]
    assert second == [(Place(r, 2, r, 2), 30.0) for r in range(2)]


def test_a_group_that_fails_ends_the_others(folder: Path) -> None:
    hangs = partial(noted, folder, partial(sleeps, (0, 1)))
    with pytest.raises(RankError, match=r"rank 1 failed first .*\n(?s:.*)mine"):
        start_each([hangs, partial(fails, "raise", 1, "sleep")], 2, CPU)
    assert gone_soon(pids(folder, 2))


TOLD = {
    "raise": "ZeroDivisionError: mine",
    "sys.exit": "SystemExit: 4",
    "os._exit": "left without a word, exit code 3",
    "SIGKILL": "killed by SIGKILL",
    "SIGTERM": "killed by SIGTERM",
}


@pytest.mark.parametrize("others", ["collective", "sleep", "busy", "return"])
@pytest.mark.parametrize("how", ["raise", "sys.exit", "os._exit", "SIGKILL"])
def test_a_rank_that_fails_ends_all(folder: Path, how: str, others: str) -> None:
    begin = time.monotonic()
    with pytest.raises(RankError) as caught:
        start(partial(noted, folder, partial(fails, how, 1, others)), 3, CPU)
    assert time.monotonic() - begin < SOON_S
    busy = " (ranks [0, 2] were still at work)" if others in ("sleep", "busy") else ""
    assert caught.value.rank == 1 and str(caught.value).startswith(f"rank 1 failed first{busy}:\n")
    assert str(caught.value).endswith(TOLD[how])
    assert not any(map(alive, pids(folder, 3)))


@pytest.mark.parametrize("how", TOLD)
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_the_first_error_is_told_not_those_that_it_causes(how: str, victim: int) -> None:
    """Neighbours see a broken connection at once; some of them report before the death is noticed."""
    for _ in range(3):
        with pytest.raises(RankError) as caught:
            start(partial(fails, how, victim, "collective"), 3, CPU)
        assert (caught.value.rank, str(caught.value).splitlines()[-1]) == (victim, TOLD[how])


def test_the_message_holds_the_traceback() -> None:
    with pytest.raises(RankError, match=r"(?s)^rank 1 failed first:\nTraceback.* in fails\n.* in leave\n.*: mine$"):
        start(partial(fails, "raise", 1, "return"), 2, CPU)


def test_a_value_that_cannot_be_sent_is_an_error() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 0 failed first:.*[Pp]ickl"):
        start(lambda place, device: lambda: 0, 1, CPU)


@pytest.mark.parametrize("hanging", [(1,), (0, 3)])
def test_past_the_limit_the_ranks_that_hang_are_named(folder: Path, hanging: tuple[int, ...]) -> None:
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=f"ranks \\[{', '.join(map(str, hanging))}\\] of 4 .* after 1 s"):
        start(partial(noted, folder, partial(sleeps, hanging)), 4, CPU, limit_s=1)
    assert 1 <= time.monotonic() - begin < SOON_S
    assert not any(map(alive, pids(folder, 4)))


def test_a_collective_that_takes_too_long_ends_the_run(folder: Path) -> None:
    def body(place: Place, device: torch.device) -> object:
        return sleeps((1,), place, device) or summed(place, device)

    with pytest.raises(RankError, match="Timed out waiting 6000ms") as caught:
        start(partial(noted, folder, body), 2, LaunchConfig(device="cpu", threads=1, timeout_s=1))
    assert caught.value.rank == 0
    assert not any(map(alive, pids(folder, 2)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGHUP], ids=lambda n: n.name)
@pytest.mark.parametrize("where", ["sleep", "collective"])
def test_ranks_end_with_the_process_that_started_them(folder: Path, number: signal.Signals, where: str) -> None:
    def body(place: Place, device: torch.device) -> object:
        return sleeps((0, 1) if where == "sleep" else (0,), place, device) or summed(place, device)

    parent = os.fork()
    if parent == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had them ignored
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        try:
            start(partial(noted, folder, body), 2, CPU)
        except BaseException as error:
            (folder / "unwound").write_text(type(error).__name__)
        finally:
            os._exit(7)
    ranks = pids(folder, 2)
    os.kill(parent, number)
    assert gone_soon([parent])
    left = os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1])
    if number in (signal.SIGTERM, signal.SIGINT):  # unwinds: the ranks are gone by then
        assert left == 7 and not any(map(alive, ranks))
        assert (folder / "unwound").read_text() == {2: "KeyboardInterrupt", 15: "SystemExit"}[number]
    else:
        assert left == -number
    assert gone_soon(ranks)


def test_what_ranks_print_is_kept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(place: Place, device: torch.device) -> None:
        print("before", place.rank)
        fails(("raise", "SIGKILL", "")[place.rank], place.rank if place.rank < 2 else 0, "sleep", place, device)

    with (tmp_path / "out").open("w") as out, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)  # a file or a pipe is written in large blocks
        print("the parent")
        with pytest.raises(RankError):
            start(body, 3, CPU)
        start(lambda place, device: print("after", end=""), 1, CPU)
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines[0] == "the parent" and sorted(lines[1:4]) == ["before 0", "before 1", "before 2"]
    assert lines[4:] == ["after"]


def test_a_busy_master_port_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        for name, value in {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(server.getsockname()[1]),
            "RANK": "5",
            "WORLD_SIZE": "7",
        }.items():
            monkeypatch.setenv(name, value)
        assert start(summed, 2, CPU, limit_s=SOON_S) == [3.0, 3.0]


@pytest.mark.parametrize("how", ["return", "raise", "SIGKILL", "limit"])
def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    gc.collect()  # what earlier tests left mapped goes now, not amid this one
    before = open_files()
    if how == "return":
        start(summed, 2, CPU)
    elif how == "limit":
        with pytest.raises(TimeoutError):
            start(partial(sleeps, (0, 1)), 2, CPU, limit_s=0.2)
    else:
        with pytest.raises(RankError):
            start(partial(fails, how, 1, "sleep"), 2, CPU)
    assert open_files() == before
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert list(tmp_path.iterdir()) == []


def test_ranks_start_from_any_thread() -> None:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(start(summed, 2, CPU)))
    thread.start()
    thread.join(SOON_S)
    assert found == [[3.0, 3.0]]
