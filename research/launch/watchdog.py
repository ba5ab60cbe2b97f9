"""Names the rank that hangs: who has not come to a collective or a message that others wait for, and waits for nobody.

Each rank publishes how many it has started in each group, and which one it waited for last. A rank that has made no
progress for `launch.timeout_s` looks who did not start that one; those may wait in turn, for whom is told by what they
have published, and so on until ranks are met that wait for nobody. It works on what the host has issued, so that it is
the same for gloo, which blocks, and NCCL, which does not.
"""

import contextlib
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache

from torch.distributed.distributed_c10d import Store, _get_default_store

from research.launch.process import Place
from research.ledger import Ledger

LOOK_S = 0.5  # between two looks, at least
LOOK_S_PER_RANK = 0.005
MOST_LISTED = 16


class HangError(RuntimeError):
    """Ranks did not come to a collective in time."""


@dataclass(frozen=True)
class Stand:
    """How far a rank has come: how much it has started by group, and what it waited for last: `number` of `group`."""

    started: Mapping[str, int] = field(default_factory=dict)
    what: str = ""
    ranks: Sequence[int] = ()  # that share it
    group: str = ""
    number: int = 0


@contextlib.contextmanager
def watched(ledger: Ledger, place: Place, timeout_s: float) -> Iterator[None]:
    """Watch this rank while the body runs. A hang is raised in the watching thread, where the launcher's hook for
    failing threads ends the process."""
    if place.world == 1:
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_watch, args=(ledger, place, timeout_s, done), daemon=True)
    thread.start()
    try:
        yield
        _publish(ledger, place)  # who is done has come to every collective; nobody shall miss it
    finally:
        done.set()
        thread.join(LOOK_S)  # it may itself wait for a store that does not answer, and must not keep an error back


def _watch(ledger: Ledger, place: Place, timeout_s: float, done: threading.Event) -> None:
    before, since = None, time.monotonic()
    every_s = max(LOOK_S, place.world * LOOK_S_PER_RANK)  # all ranks share one store
    while not done.wait(every_s):
        now = ledger.started.total(), ledger.last
        if now != before:
            _publish(ledger, place)
            before, since = now, time.monotonic()
        elif time.monotonic() - since > timeout_s and (late := who_is_late(cache(_published), place.rank)):
            raise HangError(f"{late} after {timeout_s:g} s (launch.timeout_s)")


def who_is_late(stand_of: Callable[[int], Stand], rank: int) -> str:
    """The nearest ranks on the way from this one along what ranks wait for that wait for nobody, and what they are
    waited for in; "" where this rank waits for nobody: it may be the late one."""

    def behind(rank: int) -> list[int]:
        """Those that have not started what this rank waits for."""
        stand = stand_of(rank)
        return [r for r in stand.ranks if stand_of(r).started.get(stand.group, 0) < stand.number]

    chain = [rank]
    for waiting in chain:
        missing, stand = behind(waiting), stand_of(waiting)
        if late := [r for r in missing if not behind(r)]:
            return f"{stand.what}: of ranks {_listed(stand.ranks)}, ranks {_listed(late)} did not arrive"
        chain += [r for r in missing if r not in chain]
    return f"{stand_of(rank).what}: ranks {_listed(chain)} wait for each other" if len(chain) > 1 else ""


def _publish(ledger: Ledger, place: Place) -> None:
    last = ledger.last  # before the counts, which must not be behind it
    counts = {_key(*group): n for group, n in list(ledger.started.items())}
    stand = Stand(counts)
    if last is not None:
        what = f"{last.op} of {last.purpose} on axis {last.axis} ({ledger.phase})"
        stand = Stand(counts, what, last.ranks, _key(last.axis, last.ranks), last.number)
    _get_default_store().set(f"started/{place.rank}", json.dumps(asdict(stand)))


def _published(rank: int) -> Stand:
    store: Store = _get_default_store()
    key = f"started/{rank}"
    return Stand(**json.loads(store.get(key))) if store.check([key]) else Stand()


def _listed(ranks: Sequence[int]) -> str:
    head = ",".join(map(str, ranks[:MOST_LISTED]))
    return head if len(ranks) <= MOST_LISTED else f"{head},.. ({len(ranks)} in all)"


def _key(axis: str, ranks: tuple[int, ...]) -> str:
    """Short, as every rank publishes one of each of its groups."""
    return f"{zlib.crc32(repr((axis, ranks)).encode()):x}"
