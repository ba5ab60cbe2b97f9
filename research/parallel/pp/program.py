"""One rank's side of a schedule: its list, and what it exchanges with whom and when."""

from bisect import bisect_right

from research.parallel.pp.check import messages
from research.parallel.pp.schedule import Schedule
from research.parallel.pp.simulate import Timeline, even, simulate
from research.train.action import Action, Program, parts


def program_of(schedule: Schedule, rank: int) -> Program:
    """What `rank` runs. In a simulation with equal times every message has a moment at which its receiver needs it, and
    a sender may wait for it before its entries that start later. All waits then point to earlier moments, so they form
    no circle, however long things really take."""
    sent = messages(schedule)
    line = simulate(schedule, even(schedule, 1.0, 1.0, 1.0))
    needed, starts = _needed(line), line.starts[rank]
    settled: dict[int, list[Action]] = {}
    for (sender, _), names in sent.items():
        for name in names if sender == rank else ():
            settled.setdefault(bisect_right(starts, needed[name]), []).append(name)
    return Program(
        entries=schedule.actions[rank],
        sends={name: to for (sender, to), names in sent.items() if sender == rank for name in names},
        receives={sender: names for (sender, to), names in sent.items() if to == rank},
        settled=settled,
        ways=sorted(sent),
    )


def _needed(line: Timeline) -> dict[Action, float]:
    """When a stage starts with what its neighbour has made for it."""
    found = {}
    for entries, starts in zip(line.schedule.actions, line.starts, strict=True):
        for entry, start in zip(entries, starts, strict=True):
            for kind, stage, m in parts(entry):
                if kind == "F":
                    found[Action("F", stage - 1, m)] = start
                elif kind != "W":
                    found[Action("B", stage + 1, m)] = start
    return found


def evaluation(schedule: Schedule, batches: int) -> Schedule:
    """Forwards alone. Batch n goes the way of microbatch n, or of n less as many as there are; stage s meets it in slot
    s + n, so that all ranks are at work."""
    way = {(a.stage, a.microbatch): rank for rank in range(schedule.ranks) for a in schedule.flat(rank)}
    lists: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    for slot in range(batches + schedule.stages - 1):
        for stage in range(max(0, slot - batches + 1), min(slot + 1, schedule.stages)):
            n = slot - stage
            lists[way[stage, n % schedule.microbatches]].append(Action("F", stage, n))
    return Schedule(schedule.name, schedule.stages, batches, schedule.holds, tuple(map(tuple, lists)))
