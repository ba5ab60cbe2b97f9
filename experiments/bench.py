"""Time parts of this project against other implementations of the same, side by side.

    make bench                                               # every bench
    python -m experiments.bench layer repetitions=40         # this one; writes results/bench/layer.md and .json

All sides must compute the same. Exit status 1 where they do not, or where what a bench compares with is missing.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import Progress

from research.bench.registry import BENCHES
from research.bench.report import write
from research.bench.side_by_side import Result, compare
from research.launch.process import Place
from research.train.metrics import code_version, hardware

REPETITIONS = 20
FOLDER = Path("results")


def main(words: Sequence[str]) -> int:
    if "--help" in words or "-h" in words:
        print((__doc__ or "").strip(), "\n\nBenches:", *(f"\n  {n}: {b.__doc__}" for n, b in BENCHES.items()))
        return 0
    torch.set_num_threads(1)
    try:
        names, repetitions = read(words)
        for name in names:
            bench(name, repetitions)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def read(words: Sequence[str]) -> tuple[list[str], int]:
    """Names of benches and the number of repetitions. Raises ValueError for anything else."""
    names, repetitions = [], REPETITIONS
    for word in words:
        key, _, value = word.partition("=")
        if key == "repetitions" and value.isdecimal() and int(value) > 1:
            repetitions = int(value)
        elif word in BENCHES:
            names.append(word)
        else:
            raise ValueError(f"{word} is no bench; legal: {', '.join(BENCHES)}, and repetitions=N of at least 2")
    return [name for name in BENCHES if name in names or not names], repetitions


def bench(name: str, repetitions: int) -> None:
    results: list[Result] = []
    console = Console(stderr=True)
    with Progress(console=console, transient=True) as progress:
        for case in BENCHES[name]():
            task = progress.add_task(f"{case.name}, {case.threads} threads", total=repetitions)
            results += compare(case, repetitions, lambda task=task: progress.advance(task))  # type: ignore[misc]
    version, machine = code_version(), hardware(torch.device("cpu"), Place(0, 1, 0, 1), 1)
    where = {
        "CPU": machine.device,
        "torch": machine.torch,
        "Python": machine.python,
        "commit": version.commit + (" and changes" if version.dirty else ""),
    }
    rows, page = write(FOLDER, name, BENCHES[name].__doc__ or "", results, where)
    text, out = page.read_text(encoding="utf-8"), Console()
    out.print(Markdown(text)) if out.is_terminal else print(text)
    print("wrote", rows, page)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
