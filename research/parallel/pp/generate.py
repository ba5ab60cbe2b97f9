"""Schedules by name."""

from collections.abc import Mapping
from pathlib import Path

from research.parallel.pp import bidirectional, looped, v_shaped
from research.parallel.pp.csv_file import read
from research.parallel.pp.schedule import Family, Schedule, restrict
from research.problems import Problem

FILE = "file:"
FAMILIES: Mapping[str, Family] = {
    "gpipe": looped.GPIPE,
    "1f1b": looped.ONE_F_ONE_B,
    "interleaved": looped.INTERLEAVED,
    "looped_bfs": looped.LOOPED_BFS,
    "zb_h1": looped.ZB_H1,
    "zb_h2": looped.ZB_H2,
    "interleaved_zb": looped.INTERLEAVED_ZB,
    "zbv": v_shaped.V_ZB,
    "v_half": v_shaped.V_HALF,
    "v_min": v_shaped.V_MIN,
    "dualpipe": bidirectional.DUALPIPE,
    "dualpipe_v": bidirectional.DUALPIPE_V,
}
ANY = 2  # stages of a rank where it may be any number and none is given


def generate(name: str, ranks: int, microbatches: int, per_rank: int | None = None) -> Schedule:
    """The schedule `name` for so many ranks, microbatches, and stages of each rank, or of a file: `file:PATH`.

    Raises ValueError with everything that the schedule does not allow, and what it does.
    """
    if problems := [*refusals(name, ranks, microbatches, per_rank)]:
        raise ValueError("; ".join(map(str, problems)))
    if name.startswith(FILE):
        return _fitting(read(Path(name.removeprefix(FILE))), ranks, microbatches, per_rank)
    family = FAMILIES[name]
    stages = stages_of(name, ranks, per_rank)
    per_rank = per_rank or family.per_rank or ANY
    enough = family.suits(ranks, microbatches)
    actions = tuple(map(tuple, family.lists(ranks, per_rank, enough)))
    schedule = Schedule(name, stages, enough, family.holds(ranks, per_rank), actions)
    return schedule if enough == microbatches else restrict(schedule, microbatches)


def stages_of(name: str, ranks: int, per_rank: int | None = None) -> int:
    """How many stages a schedule of that name has, which need not be made for it."""
    family = FAMILIES[name]
    return ranks * (per_rank or family.per_rank or ANY) // family.copies


def refusals(name: str, ranks: int, microbatches: int, per_rank: int | None = None) -> list[Problem]:
    """What is wrong; keys are `schedule`, `ranks`, `microbatches` and `stages per rank`."""
    numbers = {"ranks": ranks, "microbatches": microbatches, "stages per rank": 1 if per_rank is None else per_rank}
    found = [Problem(k, n, "is out of range", "an integer, at least 1") for k, n in numbers.items() if n < 1]
    if name.startswith(FILE):
        return found
    if name not in FAMILIES:
        return [*found, Problem("schedule", name, "is unknown", f"{', '.join(FAMILIES)}, {FILE}PATH")]
    family = FAMILIES[name]
    if ranks % family.copies:
        legal = ", ".join(str(family.copies * i) for i in range(1, 4))
        rule = f"must be a multiple of {family.copies} for schedule={name}"
        found.append(Problem("ranks", ranks, rule, f"{legal}, ..."))
    if per_rank is not None and family.per_rank not in (None, per_rank):
        found.append(Problem("stages per rank", per_rank, f"does not fit schedule={name}", str(family.per_rank)))
    return found


def _fitting(schedule: Schedule, ranks: int, microbatches: int, per_rank: int | None) -> Schedule:
    """A file says its own numbers; others that were asked for are refused."""
    each = max(map(len, schedule.holds))
    told = {"ranks": (ranks, schedule.ranks), "microbatches": (microbatches, schedule.microbatches)}
    told["stages per rank"] = (per_rank or each, each)
    if wrong := [f"{key}={asked}; legal: {has}" for key, (asked, has) in told.items() if asked != has]:
        raise ValueError(f"{schedule.name} is a schedule of other numbers: " + "; ".join(wrong))
    return schedule
