"""What a pipeline schedule is made of. No imports: generators, tools and the executor share it."""

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
