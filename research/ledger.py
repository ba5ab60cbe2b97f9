"""What this rank received from others: bytes, calls and waiting time, by axis, purpose, collective and phase."""

import time
from collections import defaultdict
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
        self.phase = "setup"  # set by the executor and the loop: F, B, W, optimizer or EVAL
        self.bytes: defaultdict[Label, Fraction] = defaultdict(Fraction)
        self.calls: defaultdict[Label, int] = defaultdict(int)
        self._wait_ms: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def count(self, axis: str, purpose: str, op: str, received: Fraction) -> None:
        label = Label(axis, purpose, op, self.phase)
        self.bytes[label] += received
        self.calls[label] += 1

    @contextmanager
    def waiting(self, axis: str, device: torch.device) -> Iterator[None]:
        """Time in which compute stands still for `axis`: host time on CPU, stream time on CUDA (no sync here). An
        evaluation is no part of a step, so it is not timed."""
        if self.phase == EVAL:
            yield
        elif device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._events.append((axis, start, end))
        else:
            begin = time.perf_counter()
            yield
            self._wait_ms[axis] += (time.perf_counter() - begin) * 1e3

    def wait_ms(self) -> dict[str, float]:
        """Milliseconds waited by axis so far. On CUDA it waits for the events that it reads."""
        for axis, start, end in self._events:
            end.synchronize()
            self._wait_ms[axis] += start.elapsed_time(end)
        self._events.clear()
        return dict(self._wait_ms)

    def clear(self) -> None:
        self.wait_ms()
        self.bytes.clear()
        self.calls.clear()
        self._wait_ms.clear()
