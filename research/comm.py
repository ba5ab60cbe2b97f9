"""Every collective that the project issues: labelled with its axis and purpose, counted in bytes, timed.

Bytes are those that one rank receives under the bandwidth-optimal algorithm, whatever the backend does:
all-reduce 2 (n-1)/n of the buffer (Patarasuk and Yuan 2009). A group of one communicates nothing.
"""

from fractions import Fraction
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.profiler import record_function

from research.mesh import Group

SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
T = TypeVar("T")


class Pending:
    """A collective under way. Its tensor must not be touched before `wait`, which times the standstill."""

    def __init__(self, group: Group, tensor: torch.Tensor, work: dist.Work | None) -> None:
        self._group, self._tensor, self._work = group, tensor, work

    def wait(self) -> torch.Tensor:
        if self._work is not None:
            axis = self._group.axis
            with record_function(f"wait for {axis}"), self._group.ledger.waiting(axis, self._tensor.device):
                self._work.wait()
        return self._tensor


def start_all_reduce(x: torch.Tensor, group: Group, purpose: str, op: dist.ReduceOp.RedOpType = SUM) -> Pending:
    """Reduce x in place over the group, beside whatever runs until `wait`."""
    if group.size == 1:
        return Pending(group, x, None)
    received = Fraction(2 * (group.size - 1) * x.numel() * x.element_size(), group.size)
    group.ledger.count(group.axis, group.ranks, purpose, "all_reduce", received)
    with record_function(f"{group.axis}: {purpose}"):
        return Pending(group, x, dist.all_reduce(x, op=op, group=group.process_group, async_op=True))


def all_reduce_(x: torch.Tensor, group: Group, purpose: str, op: dist.ReduceOp.RedOpType = SUM) -> torch.Tensor:
    """Reduce x in place over the group and return it."""
    return start_all_reduce(x, group, purpose, op).wait()


def gather_objects(value: T, group: Group, purpose: str) -> list[T]:
    """`value` of every rank of the group, in order. For reports before and after training, so it is not counted."""
    if group.size == 1:
        return [value]
    group.ledger.meet(group.axis, group.ranks, purpose, "all_gather")
    values: list[T | None] = [None] * group.size
    dist.all_gather_object(values, value, group=group.process_group)
    return values  # type: ignore[return-value]
