"""Runs that a table lacks, and why."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from research.ablation import Ablation
from research.attempts import Attempt, State, reason
from research.record import Row

Place = tuple[str, int, int]  # arm, seed, repetition


@dataclass(frozen=True)
class Absent:
    """A run of an arm that has no row; `seed` is None where the whole arm cannot have one."""

    arm: str
    seed: int | None
    repeat: int
    state: State
    error: str = ""  # last line of the error; the rules that an impossible arm breaks
    evidence: str = ""

    @property
    def why(self) -> str:
        return reason(self.state, self.error, self.evidence)

    @property
    def name(self) -> str:
        """Which run of the arm it is."""
        repeat = f", repetition {self.repeat + 1}" if self.repeat else ""
        return "" if self.seed is None else f"seed {self.seed}{repeat}"


def absent(
    rows: Sequence[Row], attempts: Sequence[Attempt], ablation: Ablation | None, impossible: Mapping[str, str]
) -> Iterator[Absent]:
    """Runs without a row: those that the ablation wants, and others that were tried (all of them, where its file is not
    known). The last try counts."""
    there = {(r.arm, r.seed, repeat_of(r)) for r in rows}
    tried = {(a.arm, a.seed, a.repeat): a for a in sorted(attempts, key=lambda a: a.started)}
    yield from (Absent(arm, None, 0, "impossible", why) for arm, why in impossible.items())
    wanted: list[Place] = []
    if ablation is not None:
        possible = [arm for arm in ablation.arms if arm not in impossible]
        wanted = list(itertools.product(possible, ablation.seeds, range(ablation.repeats)))
    for arm, seed, repeat in dict.fromkeys([*wanted, *sorted(tried)]):
        if (arm, seed, repeat) not in there and arm not in impossible:
            a = tried.get((arm, seed, repeat))
            yield Absent(arm, seed, repeat, *((a.state, a.error, a.evidence) if a else ("pending",)))


def repeat_of(row: Row) -> int:
    repeat = row.config.get("record", {}).get("repeat", 0)  # rows of older code have none
    return repeat if isinstance(repeat, int) else 0
