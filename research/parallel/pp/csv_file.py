"""Schedules as CSV, one row a rank, in the names that torch.distributed.pipelining gives to actions.

    0F3    forward of stage 0, microbatch 3      0B3    its backward, both gradients (our BW)
    0I3    its gradient of the input (our B)     0W3    its gradient of the weights
    (0F3;1B2)OVERLAP_F_B                         a pair that may overlap

Empty cells, and torch's communication and sharding (0SEND_F3, 2UNSHARD, ...), follow from the order and are not kept.
"""

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path

from research.parallel.pp.schedule import Schedule
from research.train.action import Action, Entry, Kind, Overlap, parts

THEIRS: dict[str, Kind] = {"F": "F", "I": "B", "W": "W", "B": "BW"}
OURS = {kind: letter for letter, kind in THEIRS.items()}
ACTION = re.compile(r"(\d+)([FIWB])(\d+)")
PAIR = re.compile(r"\(([^;]+);([^;]+)\)OVERLAP_F_B")
DERIVED = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")
LEGAL = "legal: 0F3, 0I3, 0W3, 0B3, (0F3;1B2)OVERLAP_F_B (stage, kind, microbatch)"


def read(path: Path) -> Schedule:
    """The schedule of a file. Raises ValueError with row and column of what is no action."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"schedule=file:{path} cannot be read: {error}") from error
    return parse(text, f"file:{path}")


def parse(text: str, name: str) -> Schedule:
    """Stages and microbatches are as many as the highest numbers say; a rank holds the stages that it runs."""
    rows = list(csv.reader(io.StringIO(text)))
    lists = tuple(tuple(_entries(row, f"{name}, row {i}")) for i, row in enumerate(rows, 1))
    flat = [[a for entry in entries for a in parts(entry)] for entries in lists]
    if not any(flat):
        raise ValueError(f"{name} holds no action; {LEGAL}")
    everything = [a for row in flat for a in row]
    stages, microbatches = 1 + max(a.stage for a in everything), 1 + max(a.microbatch for a in everything)
    holds = tuple(tuple(dict.fromkeys(a.stage for a in row)) for row in flat)
    return Schedule(name, stages, microbatches, holds, lists)


def _entries(row: list[str], place: str) -> Iterator[Entry]:
    for column, cell in enumerate(row, 1):
        word = cell.strip()
        if not word or DERIVED.fullmatch(word):
            continue
        pair = PAIR.fullmatch(word)
        found = [ACTION.fullmatch(w.strip()) for w in (pair.groups() if pair else [word])]
        actions = [Action(THEIRS[m[2]], int(m[1]), int(m[3])) for m in found if m]
        if len(actions) < len(found):
            raise ValueError(f"{place}, column {column}: {cell!r} is no action; {LEGAL}")
        if not pair:
            yield actions[0]
        elif [a.kind for a in actions] == ["F", "BW"]:
            yield Overlap(*actions)
        else:
            raise ValueError(f"{place}, column {column}: {cell!r} is not a forward and a backward (F;B); {LEGAL}")


def to_csv(schedule: Schedule) -> str:
    """Text that `parse` and torch's schedules read."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([_word(e) for e in entries] for entries in schedule.actions)
    return out.getvalue()


def _word(entry: Entry) -> str:
    words = [f"{a.stage}{OURS[a.kind]}{a.microbatch}" for a in parts(entry)]
    return words[0] if len(words) == 1 else f"({';'.join(words)})OVERLAP_F_B"
