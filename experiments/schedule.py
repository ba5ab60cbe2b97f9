"""Generate, check, simulate and draw a pipeline schedule. No ranks are started.

    python -m experiments.schedule zbv --ranks 4 --microbatches 8
    python -m experiments.schedule zbv --ranks 4 --microbatches 8 --times 1,1,0.8,0.1 --compare 1f1b --out zbv.svg
    python -m experiments.schedule interleaved --ranks 4 --microbatches 8 --stages 3 --csv mine.csv
    python -m experiments.schedule file:mine.csv

Times are of 1/ranks of the model: forward, gradient of the input, gradients of the weights, and a transfer.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.table import Table

from research.files import write_atomically
from research.parallel.pp.check import check
from research.parallel.pp.csv_file import read, to_csv
from research.parallel.pp.draw import FORMATS, LEGEND, picture, sketch, unit_of
from research.parallel.pp.generate import FAMILIES, FILE, generate
from research.parallel.pp.simulate import Timeline, even, simulate


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{message}; --help says more", file=sys.stderr)
        sys.exit(2)


def parser() -> argparse.ArgumentParser:
    p = Parser(prog="experiments.schedule", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("schedule", help=f"{', '.join(FAMILIES)}, {FILE}PATH")
    p.add_argument("--ranks", type=int, help="pipeline ranks (default 4, or as many as the file has)")
    p.add_argument("--microbatches", type=int, help="of a step (default 8, or as many as the file has)")
    p.add_argument("--stages", type=int, help="stages of each rank, where the schedule leaves that open")
    p.add_argument("--times", default="1,1,1,0", help="F,B,W[,comm] in any one unit (default 1,1,1,0)")
    p.add_argument("--overlap", type=float, default=1.0, help="share of its two parts that an overlapped pair takes")
    p.add_argument("--compare", action="append", default=[], help="another schedule; may be given several times")
    p.add_argument("--out", type=Path, help=f"draw the timeline: FILE.{' or FILE.'.join(FORMATS)}")
    p.add_argument("--csv", type=Path, help="write the lists of actions, as torch's schedules read them")
    return p


def times_of(text: str) -> tuple[float, float, float, float]:
    """Raises ValueError unless it is three or four numbers, none negative."""
    words = text.split(",")
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = []
    if len(numbers) not in (3, 4) or not all(0 <= n < float("inf") for n in numbers) or sum(numbers[:3]) == 0:
        raise ValueError(f"--times {text} must be F,B,W or F,B,W,comm; legal: numbers of at least 0, not all 0")
    f, b, w, *comm = numbers
    return f, b, w, comm[0] if comm else 0.0


def timeline(name: str, args: argparse.Namespace) -> Timeline:
    """A schedule, checked and simulated. Raises ValueError for what it does not allow, or a file's faults."""
    ranks, microbatches = args.ranks, args.microbatches
    if name.startswith(FILE):
        own = read(Path(name.removeprefix(FILE)))
        ranks = own.ranks if ranks is None else ranks
        microbatches = own.microbatches if microbatches is None else microbatches
    ranks = 4 if ranks is None else ranks
    microbatches = 8 if microbatches is None else microbatches
    schedule = generate(name, ranks, microbatches, args.stages if name == args.schedule else None)
    check(schedule)
    f, b, w, comm = times_of(args.times)
    return simulate(schedule, even(schedule, f, b, w, comm, args.overlap))


def summary(lines: Sequence[Timeline]) -> Table:
    columns = ("schedule", "stages a rank", "step time", "bubble", "alone", "peak activations of each rank")
    table = Table(
        *columns,
        caption="bubble: ranks wait for the last one; alone: of the rank that takes longest.\n"
        "activations: in microbatches of 1/ranks of the model",
    )
    for line in lines:
        s = line.schedule
        peaks = ", ".join(f"{n * s.ranks / s.stages:g}" for n in check(s).live)
        rates = f"{line.bubble:.4f}", f"{line.bubble_alone:.4f}"
        table.add_row(s.name, str(max(map(len, s.holds))), f"{line.step:g}", *rates, peaks)
    return table


def main(words: Sequence[str]) -> int:
    args = parser().parse_args(words)
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        if args.out and args.out.suffix.lstrip(".") not in FORMATS:
            raise ValueError(f"--out {args.out} names no picture; legal: {', '.join(f'FILE.{f}' for f in FORMATS)}")
        if not 0 < args.overlap <= 1:
            raise ValueError(f"--overlap {args.overlap:g} must be a share; legal: above 0, up to 1")
        lines = [timeline(name, args) for name in dict.fromkeys([args.schedule, *args.compare])]
        for line in lines:
            print(f"{line.schedule.name}\n{sketch(line, console.width - 8, unit_of(*lines))}\n")
        print(LEGEND)
        console.print(summary(lines))
        if args.out:
            write_atomically(args.out, picture(lines, args.out.suffix.lstrip(".")))
            print(f"wrote {args.out}")
        if args.csv:
            write_atomically(args.csv, to_csv(lines[0].schedule).encode())
            print(f"wrote {args.csv}")
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
