"""What a bench found, as rows (JSON) and as a page (Markdown)."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tabulate import tabulate

from research.bench.side_by_side import Quartiles, Result
from research.files import write_atomically

NOTE = """\
- Ratio: ours over the other, of CPU time (all threads and processes) and of wall time; median over repetitions that
  take turns, and the quartiles. Less than 1: ours is faster.
- Torch's products: a side without those of oneDNN (`models/products.py`). Ratio over another / ratio over ours with
  torch's is what it would be with the same products on both sides. Where the other side trains our model it has ours,
  unless it says torch's.
- Error: the largest relative error of any output or gradient between the two, held to a tolerance.
"""


def markdown(name: str, what: str, results: Sequence[Result], where: Mapping[str, object]) -> str:
    lines = [
        {
            "case": r.case,
            "threads": r.threads,
            "over": r.other,
            "CPU ratio": _ratio(r.cpu_ratio),
            "wall ratio": _ratio(r.wall_ratio),
            "ours (CPU ms)": f"{r.ours_cpu_ms:.1f}",
            "other (CPU ms)": f"{r.other_cpu_ms:.1f}",
            "repetitions": r.repetitions,
            "error": f"{r.error:.0e}",
        }
        for r in results
    ]
    place = ", ".join(f"{key} {value}" for key, value in where.items())
    table = tabulate(lines, headers="keys", tablefmt="pipe", disable_numparse=True)
    return f"# Bench: {name}\n\n{what}\n\n{table}\n\n{place}\n\n{NOTE}"


def write(
    folder: Path, name: str, what: str, results: Sequence[Result], where: Mapping[str, object]
) -> tuple[Path, Path]:
    """FOLDER/bench/NAME.json, a row for each ratio, and the page NAME.md made from the same."""
    rows, page = (folder / "bench" / f"{name}{suffix}" for suffix in (".json", ".md"))
    content = {"bench": name, "where": dict(where), "rows": [dataclasses.asdict(r) for r in results]}
    write_atomically(rows, json.dumps(content, indent=1).encode() + b"\n")
    write_atomically(page, markdown(name, what, results, where).encode())
    return rows, page


def _ratio(q: Quartiles) -> str:
    return f"{q.median:.3f} ({q.low:.3f} to {q.high:.3f})"
