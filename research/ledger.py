"""What this rank received from others: bytes, calls and waiting time, by axis, purpose, collective and phase."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from typing import NamedTuple, TypeVar

import torch

EVAL = "eval"  # the phase of an evaluation
GENERATE = "generate"  # and of making text
UNTIMED = (EVAL, GENERATE)  # no part of a step

Bytes = dict[str, Fraction]  # by "purpose/op/phase"
K = TypeVar("K")
V = TypeVar("V", float, Fraction)


class Label(NamedTuple):
    """Who spoke (axis), about what (purpose), how (collective) and when (phase of the step)."""

    axis: str
    purpose: str
    op: str
    phase: str


class Meeting(NamedTuple):
    """A collective or a message: what it is, the ranks that share it, and its number among those of this axis and these
    ranks."""

    axis: str
    purpose: str
    op: str
    ranks: tuple[int, ...]
    number: int


class Ledger:
    """Bytes are exact fractions, as 2 (n-1)/n of a buffer need not be whole."""

    def __init__(self) -> None:
        self.phase = "setup"  # set by the executor and the loop: F, B, W, BW, optimizer, or one of UNTIMED
        self.allocates = "activations"  # what fresh memory is for; `communication` where a collective needs a buffer
        self.bytes: defaultdict[Label, Fraction] = defaultdict(Fraction)
        self.calls: defaultdict[Label, int] = defaultdict(int)
        self.started: Counter[tuple[str, tuple[int, ...]]] = Counter()  # meetings by axis and ranks, never cleared
        self.last: Meeting | None = None  # the one that was waited for last
        self._wait_ms: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def count(self, axis: str, purpose: str, op: str, received: Fraction) -> None:
        """This rank will have received so many bytes in a collective of this phase."""
        label = Label(axis, purpose, op, self.phase)
        self.bytes[label] += received
        self.calls[label] += 1

    def meet(self, axis: str, ranks: tuple[int, ...], purpose: str, op: str) -> Meeting:
        """A collective or a message starts; the watchdog has to know, whether its bytes count here or not."""
        self.started[axis, ranks] += 1
        return Meeting(axis, purpose, op, ranks, self.started[axis, ranks])

    @contextmanager
    def buffers(self) -> Iterator[None]:
        """What is allocated here is for communication."""
        before, self.allocates = self.allocates, "communication"
        try:
            yield
        finally:
            self.allocates = before

    @contextmanager
    def waiting(self, meeting: Meeting, device: torch.device) -> Iterator[None]:
        """Time in which compute stands still for its axis: host time on CPU, stream time on CUDA (no sync here). What
        is no part of a step is not timed: nobody would read it."""
        self.last, axis = meeting, meeting.axis
        if self.phase in UNTIMED:
            yield
        elif device.type == "cuda":  # the stream waits, the host goes on
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._events.append((axis, start, end))
        else:
            begin = time.perf_counter()
            yield
            self._wait_ms[axis] += (time.perf_counter() - begin) * 1e3

    def settle(self) -> dict[str, float]:
        """Milliseconds waited by axis since the last call. On CUDA it waits for the events that it reads, so it is to
        be called where the host has waited anyway."""
        for axis, start, end in self._events:
            end.synchronize()
            self._wait_ms[axis] += start.elapsed_time(end)
        waited = dict(self._wait_ms)
        self._events.clear()
        self._wait_ms.clear()
        return waited


def added(parts: Iterable[tuple[str, Fraction]]) -> Bytes:
    """Sums by label, without those that are zero."""
    sums: defaultdict[str, Fraction] = defaultdict(Fraction)
    for label, nbytes in parts:
        sums[label] += nbytes
    return {label: nbytes for label, nbytes in sums.items() if nbytes}


def largest(of_ranks: Iterable[Mapping[K, V]]) -> dict[K, V]:
    """Of each label the most that a rank has."""
    found: dict[K, V] = {}
    for of_rank in of_ranks:
        for label, value in of_rank.items():
            found[label] = max(value, found.get(label, value))
    return found
