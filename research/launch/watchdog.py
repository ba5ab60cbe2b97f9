"""Names the rank that hangs: who has not come to a collective that others have been waiting in for too long.

Each rank publishes how many collectives it has started in each group. A rank that has made no progress for
`launch.timeout_s` looks at the others of the group it used last; those that have started fewer did not arrive.
It works on what the host has issued, so that it is the same for gloo, which blocks, and NCCL, which does not.
"""

import contextlib
import json
import threading
import time
import zlib
from collections.abc import Iterator, Sequence

from torch.distributed.distributed_c10d import Store, _get_default_store

from research.launch.process import Place
from research.ledger import Ledger

LOOK_S = 0.5  # between two looks, at least
LOOK_S_PER_RANK = 0.005
MOST_LISTED = 16


class HangError(RuntimeError):
    """Ranks did not come to a collective in time."""


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
    store, published, since = _get_default_store(), -1, time.monotonic()
    every_s = max(LOOK_S, place.world * LOOK_S_PER_RANK)  # all ranks share one store
    while not done.wait(every_s):
        total = ledger.started.total()
        if total != published:
            _publish(ledger, place)
            published, since = total, time.monotonic()
        elif time.monotonic() - since > timeout_s and (late := _late(ledger, store)):
            raise HangError(f"{late} after {timeout_s:g} s (launch.timeout_s)")


def _publish(ledger: Ledger, place: Place) -> None:
    counts = {_key(ranks): n for ranks, n in list(ledger.started.items())}
    _get_default_store().set(f"started/{place.rank}", json.dumps(counts))


def _late(ledger: Ledger, store: Store) -> str:
    """Who has not started the collective that this rank started last; "" if all have: this may be the late one."""
    if ledger.last is None:
        return ""
    label, ranks = ledger.last
    number = ledger.started[ranks]
    behind = []
    for rank in ranks:
        key = f"started/{rank}"
        counts = json.loads(store.get(key)) if store.check([key]) else {}
        if counts.get(_key(ranks), 0) < number:
            behind.append(rank)
    if not behind:
        return ""
    what = f"{label.op} of {label.purpose} on axis {label.axis} ({label.phase})"
    return f"{what}: of ranks {_listed(ranks)}, ranks {_listed(behind)} did not arrive"


def _listed(ranks: Sequence[int]) -> str:
    head = ",".join(map(str, ranks[:MOST_LISTED]))
    return head if len(ranks) <= MOST_LISTED else f"{head},.. ({len(ranks)} in all)"


def _key(ranks: tuple[int, ...]) -> str:
    """Short, as every rank publishes one of each of its groups."""
    return f"{zlib.crc32(repr(ranks).encode()):x}"
