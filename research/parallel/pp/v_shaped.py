"""Schedules from a building block: the passes of one microbatch, repeated every six slots (Qi et al. 2024,
"Pipeline Parallelism with Controllable Memory", arXiv 2405.15362, section 3).

Each rank holds two stages in the form of a V, so a microbatch passes it six times, and all passes take one slot:

    F0 forward of the early stage     B1 backward of the late stage     W1, W0 weights of either
    F1 forward of the late stage      B0 backward of the early stage

What is live at once is what a block keeps alive (from F to W) over six slots: memory is chosen by choosing the block.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from research.parallel.pp.schedule import Placement, folded
from research.train.action import Action, Entry, Kind

PERIOD = 6
F0, F1, B1, B0, W1, W0 = range(PERIOD)
KINDS: tuple[Kind, ...] = ("F", "F", "B", "B", "W", "W")
LATE = (0, 1, 1, 0, 1, 0)  # which of a rank's two stages a pass belongs to

Row = dict[int, tuple[int, int]]  # slot -> (pass, microbatch), of one rank


@dataclass(frozen=True)
class Block:
    """Slots between a pass on one rank and on the next: `down` the early stages, `up` the late ones; between the two
    passes of the last rank: `turn` of forward, `back` of backward."""

    down: int
    up: int
    turn: int
    back: int
    per_rank: int = 2
    copies: int = 1

    def holds(self, ranks: int, per_rank: int) -> Placement:
        return folded(ranks)

    def suits(self, ranks: int, microbatches: int) -> int:
        """So many that every rank is busy for some time."""
        return max(microbatches, 2 * ranks - 1)

    def lists(self, ranks: int, per_rank: int, microbatches: int) -> Iterator[Sequence[Entry]]:
        """Peak activations are those of the repeated block, never more."""
        rows = [
            _with_weights({o + PERIOD * m: (k, m) for k, o in enumerate(starts) for m in range(microbatches)})
            for starts in offsets(ranks, self)
        ]
        _squeeze(rows, max(int(_live(row).max()) for row in rows))
        _cool_down(rows)
        for row, stages in zip(rows, folded(ranks), strict=True):
            yield [Action(KINDS[k], stages[LATE[k]], m) for _, (k, m) in sorted(row.items())]


V_MIN = Block(down=1, up=1, turn=1, back=1)
V_HALF = Block(down=2, up=1, turn=1, back=2)
V_ZB = Block(down=4, up=2, turn=3, back=3)  # ZB-V of arXiv 2401.10241, section 6


def offsets(ranks: int, block: Block) -> list[tuple[int, int, int, int]]:
    """Slots of F0, F1, B1, B0 of the first microbatch on each rank. Loss to backward is one slot on rank 0, or the few
    more that keep repeated blocks from meeting."""
    far, gap = ranks - 1, 0
    while True:
        gap += 1
        found = []
        for rank in range(ranks):
            f1 = block.down * far + block.turn + block.up * (far - rank)
            b1 = (block.down + block.up) * far + block.turn + gap + block.down * rank
            b0 = b1 + (block.down + block.up) * (far - rank) + block.back
            found.append((block.down * rank, f1, b1, b0))
        if all(len({slot % PERIOD for slot in row}) == len(row) for row in found):
            return found


def _with_weights(row: Row) -> Row:
    """Put the weights that are missing into free slots, oldest first: of the early stage until the last backward has
    run and one slot more, then of the late stage first."""
    there = {entry for entry in row.values() if entry[0] >= W1}
    waiting: dict[int, deque[int]] = {W0: deque(), W1: deque()}
    full: Row = {}
    slot, last = min(row), max(row)
    while slot <= last or waiting[W0] or waiting[W1]:
        if slot in row:
            k, m = full[slot] = row[slot]
            if k in (B1, B0) and (k + 2, m) not in there:
                waiting[k + 2].append(m)
        else:
            order = (W0, W1) if slot <= last + 1 else (W1, W0)
            k = next((k for k in order if waiting[k]), -1)
            if k >= 0:
                full[slot] = (k, waiting[k].popleft())
        slot += 1
    return full


def _live(row: Row) -> NDArray[np.int64]:
    """Activations held during each slot: from F to the end of W."""
    change = np.zeros(max(row) + 2, dtype=np.int64)
    for slot, (k, _) in row.items():
        if k in (F0, F1):
            change[slot] += 1
        elif k in (W1, W0):
            change[slot + 1] -= 1
    return np.cumsum(change)


def _earliest(slots: list[dict[tuple[int, int], int]], rank: int, k: int, m: int) -> int:
    """First slot after what a pass needs, and after the same pass of the microbatch before."""
    if k in (F0, B1):
        before = (rank - 1, k) if rank else (rank, k - 1)
    elif k in (F1, B0):
        before = (rank + 1, k) if rank + 1 < len(slots) else (rank, k - 1)
    else:
        before = (rank, k - 2)
    needed = slots[before[0]][before[1], m] if before[1] >= 0 else -1
    return max(needed, slots[rank][k, m - 1] if m else -1) + 1


def _in_time(rows: list[Row]) -> Iterator[tuple[int, int, int, int]]:
    """(slot, rank, pass, microbatch) of all, by time."""
    yield from sorted((slot, rank, k, m) for rank, row in enumerate(rows) for slot, (k, m) in row.items())


def _squeeze(rows: list[Row], limit: int) -> None:
    """Move each pass to the first free slot after what it needs, as far as no rank then holds more than `limit`."""
    held = [_live(row) for row in rows]
    slots = [{entry: slot for slot, entry in row.items()} for row in rows]
    for slot, rank, k, m in _in_time(rows):
        row, live = rows[rank], held[rank]
        first = _earliest(slots, rank, k, m)
        if k in (F0, F1):  # what it makes is held from then on
            full = np.flatnonzero(live[first:slot] >= limit)
            first += int(full[-1]) + 1 if full.size else 0
        target = next((s for s in range(first, slot) if s not in row), slot)
        row[target] = row.pop(slot)
        slots[rank][k, m] = target
        if k in (F0, F1):
            live[target:slot] += 1
        elif k in (W1, W0):
            live[target + 1 : slot + 1] -= 1


def _cool_down(rows: list[Row]) -> None:
    """Once a rank has run its last forward, and the backward that goes with it, backwards go before weights: others
    wait for them, and no new activation can come to lie on those that weights still hold."""
    ends = [max(slot for slot, (k, _) in row.items() if k in (F0, F1)) + 2 for row in rows]
    for row, end in zip(rows, ends, strict=True):
        for slot in [s for s, (k, _) in row.items() if k in (W1, W0) and s > end]:
            del row[slot]
    slots = [{entry: slot for slot, entry in row.items()} for row in rows]
    for slot, rank, k, m in _in_time(rows):
        if slot > ends[rank]:
            first = max(_earliest(slots, rank, k, m), ends[rank] + 1)
            target = next((s for s in range(first, slot) if s not in rows[rank]), slot)
            rows[rank][target] = rows[rank].pop(slot)
            slots[rank][k, m] = target
    rows[:] = [_with_weights(row) for row in rows]
