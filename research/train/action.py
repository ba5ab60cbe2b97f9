"""What a pipeline schedule is made of. No imports of the project: generators, tools and the executor share it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "W", "BW"]


class Action(NamedTuple):
    """One unit of work of a stage on a microbatch: F forward, B backward for the gradient of the input, W the gradients
    of the weights, BW both at once."""

    kind: Kind
    stage: int
    microbatch: int


class Overlap(NamedTuple):
    """A forward and a backward of two microbatches that may interleave; one after the other is right as well."""

    forward: Action
    backward: Action


Entry = Action | Overlap  # an element of a rank's list


def parts(entry: Entry) -> tuple[Action, ...]:
    """The actions of an entry, in the order in which they may run one by one."""
    return (entry,) if isinstance(entry, Action) else tuple(entry)


def made(action: Action) -> Action:
    """The name of what an action makes for others: F an activation, B and BW the gradient of the stage's input."""
    return action._replace(kind="B") if action.kind == "BW" else action


@dataclass(frozen=True)
class Program:
    """What one rank runs, and what it exchanges with others; `made` names what travels. Ranks are pp coordinates.

    Messages are received in the order of their sender. A rank may wait for a send before the entries that `settled`
    names: by then its receiver has asked for it, whatever else it waits for.
    """

    entries: Sequence[Entry]
    sends: Mapping[Action, int] = field(default_factory=dict)  # what is made here for another rank, and that rank
    receives: Mapping[int, Sequence[Action]] = field(default_factory=dict)  # by sender
    settled: Mapping[int, Sequence[Action]] = field(default_factory=dict)  # by place in `entries`
    ways: Sequence[tuple[int, int]] = ()  # from whom to whom, of all ranks

    @property
    def actions(self) -> list[Action]:
        return [action for entry in self.entries for action in parts(entry)]

    @property
    def has_pairs(self) -> bool:
        return any(isinstance(entry, Overlap) for entry in self.entries)


def one_stage(microbatches: int) -> Program:
    """Of a rank that holds the whole model: each microbatch forward, then at once backward."""
    return Program([Action(kind, 0, m) for m in range(microbatches) for kind in ("F", "BW")])


def forward_only(batches: int) -> Program:
    """The same for an evaluation: no gradients, so no graph is kept."""
    return Program([Action("F", 0, m) for m in range(batches)])
