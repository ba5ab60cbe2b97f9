"""What this rank received from others: bytes, calls and waiting time, by axis, purpose, collective and phase."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import NamedTuple

import torch

EVAL = "eval"  # the phase of an evaluation


class Label(NamedTuple):
    """Who spoke (axis), about what (purpose), how (collective) and when (phase of the step)."""

    axis: str
    purpose: str
    op: str
    phase: str


class Ledger:
    """Bytes are exact fractions, as 2 (n-1)/n of a buffer need not be whole."""

    def __init__(self) -> None:
        self.phase = "setup"  # set by the executor and the loop: F, BW, optimizer or EVAL
        self.allocates = "activations"  # what fresh memory is for; `communication` where a collective needs a buffer
        self.bytes: defaultdict[Label, Fraction] = defaultdict(Fraction)
        self.calls: defaultdict[Label, int] = defaultdict(int)
        self.started: Counter[tuple[int, ...]] = Counter()  # collectives by the ranks that share them, never cleared
        self.last: tuple[Label, tuple[int, ...]] | None = None  # the one that was started last
        self._wait_ms: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def count(self, axis: str, ranks: tuple[int, ...], purpose: str, op: str, received: Fraction) -> None:
        """A collective starts, in which this rank will have received so many bytes."""
        label = self.meet(axis, ranks, purpose, op)
        self.bytes[label] += received
        self.calls[label] += 1

    def meet(self, axis: str, ranks: tuple[int, ...], purpose: str, op: str) -> Label:
        """A collective starts whose bytes do not count; the watchdog has to know of it all the same."""
        label = Label(axis, purpose, op, self.phase)
        self.started[ranks] += 1
        self.last = label, ranks
        return label

    def sent(self, ranks: tuple[int, ...]) -> None:
        """A message leaves. Its receiver counts its bytes, and this rank does not wait."""
        self.started[ranks] += 1

    @contextmanager
    def buffers(self) -> Iterator[None]:
        """What is allocated here is for communication."""
        before, self.allocates = self.allocates, "communication"
        try:
            yield
        finally:
            self.allocates = before

    @contextmanager
    def waiting(self, axis: str, device: torch.device) -> Iterator[None]:
        """Time in which compute stands still for `axis`: host time on CPU, stream time on CUDA (no sync here). An
        evaluation is no part of a step, so it is not timed."""
        if self.phase == EVAL:
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
