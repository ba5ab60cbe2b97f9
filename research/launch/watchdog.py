"""Names the rank that hangs: who has not come to a collective that others have been waiting in for too long.

Each rank publishes how many collectives it has started in each group. A rank that has made no progress for
`launch.timeout_s` looks at the others of the group it used last; those that have started fewer did not arrive.
It works on what the host has issued, so that it is the same for gloo, which blocks, and NCCL, which does not.
"""

import contextlib
import json
import threading
import time
from collections.abc import Iterator

from torch.distributed.distributed_c10d import Store, _get_default_store

from research.launch.process import Place
from research.ledger import Ledger

LOOK_S = 0.5  # between two looks


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
    finally:
        done.set()
        thread.join()


def _watch(ledger: Ledger, place: Place, timeout_s: float, done: threading.Event) -> None:
    store, published, since = _get_default_store(), -1, time.monotonic()
    while not done.wait(LOOK_S):
        total = ledger.started.total()
        if total != published:
            counts = {_key(ranks): n for ranks, n in list(ledger.started.items())}
            store.set(f"started/{place.rank}", json.dumps(counts))
            published, since = total, time.monotonic()
        elif time.monotonic() - since > timeout_s and (late := _late(ledger, store)):
            raise HangError(f"{late} after {timeout_s:g} s (launch.timeout_s)")


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
    return f"{what}: of ranks {_key(ranks)}, ranks {_key(tuple(behind))} did not arrive"


def _key(ranks: tuple[int, ...]) -> str:
    return ",".join(map(str, ranks))
