"""What every schedule must keep: each action exactly once, after all that it needs, with no rank waiting for ever."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from research.parallel.pp.schedule import Schedule
from research.train.action import Action, Entry, made, parts

MANY = 6  # problems that are worth reading at once


class ScheduleError(ValueError):
    """A schedule that cannot be run, with all that is wrong with it."""


@dataclass(frozen=True)
class Report:
    """Of a schedule that passed. `live`: peak live activations of each rank, counted in stages' microbatches.
    `crossed`: messages that their receiver uses later than one that was sent after them on the same way; its receives
    must be posted in the order of the sender (`messages`), not in that of its own list."""

    live: tuple[int, ...]
    crossed: int


def check(schedule: Schedule) -> Report:
    """Raises ScheduleError with what is wrong."""
    if problems := [*_counted(schedule)] or [*_placed(schedule)]:
        left = len(problems) - MANY
        more = [f"and {left} more"] if left > 0 else []
        raise ScheduleError(f"schedule {schedule.name}: " + "; ".join(problems[:MANY] + more))
    return Report(tuple(int(x) for x in peaks(schedule)), crossed(schedule))  # which meets every deadlock


def needs(action: Action, stages: int) -> tuple[Action, ...]:
    """What must have run before; of a backward only its kind for this stage is known, so B stands for B or BW.

    F needs F of the stage before. B and BW need F of their stage, and B of the stage behind. W needs B of its stage.
    """
    kind, stage, m = action
    if kind == "F":
        return (Action("F", stage - 1, m),) if stage else ()
    if kind == "W":
        return (Action("B", stage, m),)
    forward = Action("F", stage, m)
    return (forward, Action("B", stage + 1, m)) if stage + 1 < stages else (forward,)


def _counted(schedule: Schedule) -> Iterator[str]:
    """F once, and either BW once or B and W once, of every stage and microbatch."""
    counts = Counter(action for rank in range(schedule.ranks) for action in schedule.flat(rank))
    if schedule.stages * schedule.microbatches > len(counts):  # a mistyped number, most likely
        yield (
            f"{len(counts)} actions are too few for {schedule.stages} stages, {schedule.microbatches} microbatches: a "
            "forward and a backward of each"
        )
        return
    for stage in range(schedule.stages):
        for m in range(schedule.microbatches):
            f, b, w, bw = (counts.pop(Action(kind, stage, m), 0) for kind in ("F", "B", "W", "BW"))
            if f != 1:
                yield f"F of stage {stage}, microbatch {m} runs {f} times, not once"
            if (b, w, bw) not in ((1, 1, 0), (0, 0, 1)):
                said = f"BW {bw}, B {b}, W {w} times"
                yield f"backward of stage {stage}, microbatch {m} runs {said}: legal are BW once, or B and W once each"
    for (kind, stage, m), _ in counts.items():
        yield (
            f"{kind} of stage {stage}, microbatch {m} is none of {schedule.stages} stages, {schedule.microbatches} "
            "microbatches"
        )


def _placed(schedule: Schedule) -> Iterator[str]:
    """A microbatch meets a stage on one rank, which holds it."""
    where: dict[tuple[int, int], int] = {}
    for rank in range(schedule.ranks):
        for stage, m in sorted({(a.stage, a.microbatch) for a in schedule.flat(rank)}):
            if stage not in schedule.holds[rank]:
                yield f"rank {rank} runs stage {stage} but holds {', '.join(map(str, schedule.holds[rank]))}"
            elif where.setdefault((stage, m), rank) != rank:
                yield f"stage {stage} runs microbatch {m} on ranks {where[stage, m]} and {rank}"


def walk(schedule: Schedule) -> Iterator[tuple[int, Entry, list[Action]]]:
    """Rank, entry and its needs, of everything, in an order that all needs allow: every rank goes on as far as it can.

    Sends do not wait for their receiver and keep the order in which they were made. Raises ScheduleError if ranks wait
    for each other.
    """
    done: set[Action] = set()
    waiting: dict[Action, list[int]] = {}  # for what -> the ranks that stand there
    place = [0] * schedule.ranks
    ready = deque(range(schedule.ranks))
    while ready:
        rank = ready.popleft()
        entries = schedule.actions[rank]
        while place[rank] < len(entries):
            entry = entries[place[rank]]
            actions = parts(entry)
            needed = [n for a in actions for n in needs(a, schedule.stages)]
            missing = [n for n in needed if n not in done]
            if missing:
                waiting.setdefault(missing[0], []).append(rank)
                break
            yield rank, entry, needed
            place[rank] += 1
            for a in actions:
                result = made(a)
                done.add(result)
                ready.extend(waiting.pop(result, ()))
    if waiting:
        stuck = sorted((rank, need) for need, ranks in waiting.items() for rank in ranks)
        told = [
            f"rank {rank} stands before {show(schedule.actions[rank][place[rank]])} and waits for {show(need)}"
            for rank, need in stuck
        ]
        raise ScheduleError(f"schedule {schedule.name} deadlocks: " + "; ".join(told[:MANY]))


def show(entry: Entry) -> str:
    return " with ".join(f"{a.kind} of stage {a.stage}, microbatch {a.microbatch}" for a in parts(entry))


def peaks(schedule: Schedule, kept: Sequence[float] = (), late: Sequence[float] = ()) -> tuple[float, ...]:
    """Most that each rank ever holds of activations: `kept[stage]` from F on, `late[stage]` after B until W has run;
    1 and as much again unless given. The order of a rank's list decides it, whatever the times."""
    kept, late = kept or [1] * schedule.stages, late or kept or [1] * schedule.stages
    found = []
    for rank in range(schedule.ranks):
        held = most = 0.0
        for kind, stage, _ in schedule.flat(rank):
            if kind == "F":
                held += kept[stage]
                most = max(most, held)
            elif kind == "B":
                held += late[stage] - kept[stage]
                most = max(most, held)
            else:
                held -= late[stage] if kind == "W" else kept[stage]
        found.append(most)
    return tuple(found)


def messages(schedule: Schedule) -> dict[tuple[int, int], list[Action]]:
    """(sender, receiver) -> what it sends, in its order: activations by the F that makes them, gradients by the B."""
    to = {(a.stage, a.microbatch): rank for rank in range(schedule.ranks) for a in schedule.flat(rank)}
    found: dict[tuple[int, int], list[Action]] = {}
    for rank in range(schedule.ranks):
        for action in map(made, schedule.flat(rank)):
            step = {"F": 1, "B": -1, "W": 0}[action.kind]
            receiver = to.get((action.stage + step, action.microbatch), rank)
            if receiver != rank:
                found.setdefault((rank, receiver), []).append(action)
    return found


def crossed(schedule: Schedule) -> int:
    """Messages that are used after one that was sent later on the same way; a walk, which may raise."""
    used: list[dict[Action, int]] = [{} for _ in range(schedule.ranks)]
    place = [0] * schedule.ranks
    for rank, _, needed in walk(schedule):
        used[rank].update(dict.fromkeys(needed, place[rank]))
        place[rank] += 1
    late = 0
    for (_, receiver), sent in messages(schedule).items():
        soonest = len(schedule.actions[receiver])
        for message in reversed(sent):
            late += used[receiver][message] > soonest
            soonest = min(soonest, used[receiver][message])
    return late
