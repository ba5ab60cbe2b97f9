"""Measure a step of each pipeline schedule on this machine, and print it beside its simulation.

    python -m experiments.pipeline                    # every schedule: sleeps on 4 ranks, real computation on 2
    python -m experiments.pipeline 1f1b zbv ms=40     # these; a stage's passes take 40 ms each where they sleep

With sleeps a rank needs no core, so that the order of the schedules is theirs alone.
"""

import math
import sys
from collections.abc import Iterator, Sequence

import torch
from rich.console import Console
from rich.table import Table

from research import settings
from research.bench.pipeline import Beside, computed, slept
from research.parallel.axis import problems
from research.parallel.pp.generate import FAMILIES
from research.problems import Problem

BASE = "experiments/configs/tiny.yaml"
SLEEPS = ["pp.degree=4", "model.layers=6", "train.microbatches=8", "train.dtype=float32"]
REAL = [
    "pp.degree=2",
    "model.layers=8",
    "train.microbatches=8",
    "train.dtype=float32",
    "model.dim=256",
    "model.ffn=768",
]
REAL += ["model.experts=0", "data.sequence=256"]


def measured(names: Sequence[str], ms: float) -> Iterator[tuple[str, Beside]]:
    sleeps, real = (
        [settings.load(BASE, [*words, f"pp.schedule={name}"], [problems]) for name in names] for words in (SLEEPS, REAL)
    )
    for config in sleeps:
        yield f"4 ranks, sleeps of {ms:g} ms", slept(config, ms / 1e3, ms / 1e3, ms / 1e3)
    for config in real:
        yield "2 ranks, computed", computed(config)


def time_ms(text: str) -> float:
    try:
        ms = float(text)
    except ValueError:
        ms = math.nan
    if not 0 < ms < math.inf:
        raise ValueError(Problem("ms", text, "is no time of a pass", "a number of milliseconds, more than 0"))
    return ms


def main(words: Sequence[str]) -> int:
    if "--help" in words or "-h" in words:
        print((__doc__ or "").strip())
        return 0
    torch.set_num_threads(1)  # ranks are forked from this process
    names = [w for w in words if not w.startswith("ms=")] or list(FAMILIES)
    try:
        ms = time_ms(next((w[3:] for w in words if w.startswith("ms=")), "50"))
        table = Table("what", "schedule", "measured ms", "simulated ms", "ratio")
        for what, line in measured(names, ms):
            table.add_row(
                what, line.schedule, f"{line.measured_ms:.1f}", f"{line.simulated_ms:.1f}", f"{line.ratio:.3f}"
            )
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
