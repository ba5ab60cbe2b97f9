"""Every collective that the project issues: labelled with its axis and purpose, counted in bytes, timed.

Bytes are those that one rank receives under the bandwidth-optimal algorithm, whatever the backend does:
all-reduce 2 (n-1)/n of the buffer (Patarasuk and Yuan 2009), all-gather and reduce-scatter (n-1)/n of the larger
side; all-to-all the rows that others send; a message counts at its receiver. A group of one communicates nothing.

`start_*` begin beside whatever runs until `wait`; those named like an operation are differentiable, and their backward
is the exact adjoint, counted under the phase that runs it.

n ranks of the group
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from research.ledger import Meeting
from research.mesh import Group

SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
T = TypeVar("T")

# Newer releases of torch have these under other names, and warn of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A collective under way. Its tensors must not be touched before `wait`, which times the standstill and then does
    what is left (`last`)."""

    def __init__(
        self,
        group: Group,
        result: Tensor,
        work: dist.Work | None,
        meeting: Meeting | None = None,
        given: Tensor | None = None,
        last: Callable[[], object] | None = None,
    ) -> None:
        self.result = result
        self._group, self._work, self._meeting, self._given, self._last = group, work, meeting, given, last

    def wait(self) -> Tensor:
        if self._work is not None:
            assert self._meeting is not None
            with _waiting(self._group, self._meeting, self.result.device):
                self._work.wait()
            if self._last is not None:
                self._last()
            self._work = self._given = self._last = None
        return self.result


class Exchange:
    """Messages under way. Those sent must not be touched before `wait`, which returns those received."""

    def __init__(
        self, group: Group, meeting: Meeting, received: list[Tensor], sent: list[Tensor], works: Sequence[dist.Work]
    ) -> None:
        self._group, self._meeting, self._received, self._sent, self._works = group, meeting, received, sent, works

    def wait(self) -> list[Tensor]:
        if self._works:
            with _waiting(self._group, self._meeting, [*self._received, *self._sent][0].device):
                for work in self._works:
                    work.wait()
            self._works, self._sent = (), []
        return self._received


def start_exchange(
    send: Sequence[tuple[Tensor, int]], receive: Sequence[tuple[Tensor, int]], group: Group, purpose: str
) -> Exchange:
    """Send tensors to ranks of the group, and fill buffers with what others send, all at once. Two ranks must name what
    passes between them in the same order, and all ranks start their exchanges in one order. The first one after a group
    was made concerns all of its ranks (NCCL)."""
    sent, received = [x.contiguous() for x, _ in send], [x for x, _ in receive]
    meeting = group.ledger.meet(group.axis, group.ranks, purpose, "exchange")  # for all, who has no message as well
    if not (sent or received):
        return Exchange(group, meeting, [], [], ())
    _count(group, purpose, "exchange", Fraction(sum(x.numel() for x in received)), [*received, *sent][0])
    to, source = ([group.ranks[rank] for _, rank in messages] for messages in (send, receive))
    ops = [dist.P2POp(dist.isend, x, r, group.process_group) for x, r in zip(sent, to, strict=True)]
    ops += [dist.P2POp(dist.irecv, x, r, group.process_group) for x, r in zip(received, source, strict=True)]
    with record_function(f"{group.axis}: {purpose}"):
        return Exchange(group, meeting, received, sent, dist.batch_isend_irecv(ops))


def start_all_reduce(x: Tensor, group: Group, purpose: str, op: dist.ReduceOp.RedOpType = SUM) -> Pending:
    """Reduce x in place over the group."""
    if group.size == 1:
        return Pending(group, x, None)
    meeting = _meet(group, purpose, "all_reduce", Fraction(2 * (group.size - 1) * x.numel(), group.size), x)
    with record_function(f"{group.axis}: {purpose}"):
        if x.dtype == torch.bfloat16 and op == SUM and _by_gloo(group):
            # It rounds at every hop; this sum rounds once.
            wide = x.float()
            work = dist.all_reduce(wide, op=op, group=group.process_group, async_op=True)
            return Pending(group, x, work, meeting, wide, lambda: x.copy_(wide))
        return Pending(group, x, dist.all_reduce(x, op=op, group=group.process_group, async_op=True), meeting)


def start_all_gather(x: Tensor, group: Group, purpose: str) -> Pending:
    """x (..) of every rank -> (n, ..), in order."""
    x = x.contiguous()
    if group.size == 1:
        return Pending(group, x[None], None)
    out = x.new_empty(group.size, *x.shape)
    meeting = _meet(group, purpose, "all_gather", Fraction((group.size - 1) * x.numel()), x)
    with record_function(f"{group.axis}: {purpose}"):
        flat = out.view(-1, *x.shape[1:]) if x.dim() else out
        return Pending(group, out, _all_gather(flat, x, group=group.process_group, async_op=True), meeting, x)


def start_reduce_scatter(x: Tensor, group: Group, purpose: str) -> Pending:
    """x (n, ..) of every rank -> (..): the sum over ranks of what each has for this one."""
    x = x.contiguous()
    if group.size == 1:
        return Pending(group, x[0], None)
    out = x.new_empty(x.shape[1:])
    meeting = _meet(group, purpose, "reduce_scatter", Fraction((group.size - 1) * out.numel()), x)
    with record_function(f"{group.axis}: {purpose}"):
        if _by_gloo(group):
            # Its own is an all-reduce of everything, and rounds bfloat16 at every hop; this sum rounds once.
            parts = torch.empty_like(x)
            work = dist.all_to_all_single(parts, x, group=group.process_group, async_op=True)
            return Pending(group, out, work, meeting, x, lambda: _sum(parts, out))
        flat = x.view(-1, *out.shape[1:]) if out.dim() else x
        work = _reduce_scatter(out, flat, group=group.process_group, async_op=True)
        return Pending(group, out, work, meeting, x)


def _sum(parts: Tensor, out: Tensor) -> None:
    """out (..) = the sum of parts (n, ..)"""
    if out.dtype == torch.bfloat16:
        torch.sum(parts, 0, out=out)
    else:  # twice as fast
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out.add_(part)


def _by_gloo(group: Group) -> bool:
    return bool(dist.get_backend(group.process_group) == dist.Backend.GLOO)


def start_all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group, purpose: str) -> Pending:
    """x (N, ..), of which rank i gets sent[i] rows, in order -> (M, ..): received[i] rows of rank i, in order."""
    x = x.contiguous()
    if group.size == 1:
        return Pending(group, x, None)
    out = x.new_empty(sum(received), *x.shape[1:])
    others = len(out) - received[group.rank]
    meeting = _meet(group, purpose, "all_to_all", Fraction(others * math.prod(x.shape[1:])), x)
    with record_function(f"{group.axis}: {purpose}"):
        rows = list(received), list(sent)
        work = dist.all_to_all_single(out, x, *rows, group=group.process_group, async_op=True)
        return Pending(group, out, work, meeting, x)


def start_send(x: Tensor, way: Group, purpose: str) -> Pending:
    """Send x from the first rank of a way to its last, which counts its bytes."""
    x = x.contiguous()
    meeting = way.ledger.meet(way.axis, way.ranks, purpose, "send")
    with record_function(f"{way.axis}: send"):
        return Pending(way, x, dist.isend(x, way.ranks[-1], group=way.process_group), meeting)


class Receiving(Pending):
    """A message that may be asked for long before it is needed: it counts in the phase that needs it."""

    def wait(self) -> Tensor:
        assert self._meeting is not None
        _count(self._group, self._meeting.purpose, "receive", Fraction(self.result.numel()), self.result)
        return super().wait()


def start_receive(out: Tensor, way: Group, purpose: str) -> Receiving:
    """Receive into `out`, on the last rank of a way, what its first rank sends. In the order in which it sends."""
    meeting = way.ledger.meet(way.axis, way.ranks, purpose, "receive")
    with record_function(f"{way.axis}: {purpose}"):
        return Receiving(way, out, dist.irecv(out, way.ranks[0], group=way.process_group), meeting)


def all_reduce_(x: Tensor, group: Group, purpose: str, op: dist.ReduceOp.RedOpType = SUM) -> Tensor:
    """Reduce x in place over the group and return it."""
    return start_all_reduce(x, group, purpose, op).wait()


def all_reduce(x: Tensor, group: Group, purpose: str) -> Tensor:
    """The sum over ranks."""
    y: Tensor = _AllReduce.apply(x, group, purpose) if group.size > 1 else x
    return y


def all_gather(x: Tensor, group: Group, purpose: str, dim: int) -> Tensor:
    """(.., s, ..) -> (.., n*s, ..) along dim, in the order of ranks."""
    y: Tensor = _AllGather.apply(x, group, purpose, dim) if group.size > 1 else x
    return y


def reduce_scatter(x: Tensor, group: Group, purpose: str, dim: int) -> Tensor:
    """(.., n*s, ..) -> (.., s, ..): this rank's part, along dim, of the sum over ranks."""
    y: Tensor = _ReduceScatter.apply(x, group, purpose, dim) if group.size > 1 else x
    return y


def all_to_all(x: Tensor, group: Group, purpose: str) -> Tensor:
    """x (n, ..) -> (n, ..): part i goes to rank i, and part i of the result comes from rank i."""
    one_each = [1] * group.size
    return begin_all_to_all(x, one_each, one_each, group, purpose).wait() if group.size > 1 else x


class _AllReduce(torch.autograd.Function):
    """
    forward   (..) -> (..)   all-reduce
    backward  (..) -> (..)   all-reduce
    """

    @staticmethod
    def forward(ctx, x: Tensor, group: Group, purpose: str) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.about = group, purpose
        return all_reduce_(x.clone(memory_format=torch.contiguous_format), group, purpose)

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
        return all_reduce_(dy.clone(memory_format=torch.contiguous_format), *ctx.about), None, None


class _AllGather(torch.autograd.Function):
    """
    forward   (.., s, ..)   -> (.., n*s, ..)   all-gather
    backward  (.., n*s, ..) -> (.., s, ..)     reduce-scatter
    """

    @staticmethod
    def forward(ctx, x: Tensor, group: Group, purpose: str, dim: int) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.about = group, purpose, dim
        return joined(start_all_gather(x, group, purpose).wait(), dim)

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
        group, purpose, dim = ctx.about
        return start_reduce_scatter(parted(dy, group.size, dim), group, purpose).wait(), None, None, None


class _ReduceScatter(torch.autograd.Function):
    """
    forward   (.., n*s, ..) -> (.., s, ..)     reduce-scatter
    backward  (.., s, ..)   -> (.., n*s, ..)   all-gather
    """

    @staticmethod
    def forward(ctx, x: Tensor, group: Group, purpose: str, dim: int) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.about = group, purpose, dim
        return start_reduce_scatter(parted(x, group.size, dim), group, purpose).wait()

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
        group, purpose, dim = ctx.about
        return joined(start_all_gather(dy, group, purpose).wait(), dim), None, None, None


class Begun:
    """A differentiable collective under way beside what runs until `wait`. So is its adjoint in backward, which goes
    through a graph from its end: it starts where `wait` stands, and is waited for where this stands. A recompute that
    has all it needs may stop in between: a collective must run without being waited for."""

    def __init__(self, x: Tensor, there: Callable[[Tensor], Pending], back: Callable[[Tensor], Pending]) -> None:
        self._way = _Way(there, back)
        self._link: Tensor = _Begin.apply(x, self._way)

    def wait(self) -> Tensor:
        y: Tensor = _Wait.apply(self._link, self._way)
        return y


class _Way:
    """How `Begun` goes there and back, and what is under way."""

    def __init__(self, there: Callable[[Tensor], Pending], back: Callable[[Tensor], Pending]) -> None:
        self.there, self.back = there, back
        self.pending: Pending | None = None

    def arrived(self) -> Tensor:
        assert self.pending is not None, "a collective is waited for once"
        pending, self.pending = self.pending, None
        return pending.wait()


class _Begin(torch.autograd.Function):
    """
    forward   x -> a stand-in of its shape, without memory   start
    backward  dx, not yet there -> dx                        wait for the adjoint
    """

    @staticmethod
    def forward(ctx, x: Tensor, way: _Way) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.way = way
        way.pending = way.there(x)
        return x.new_empty(()).expand(x.shape)

    @staticmethod
    def backward(ctx, dx: Tensor):  # type: ignore[no-untyped-def]
        return ctx.way.arrived(), None


class _Wait(torch.autograd.Function):
    """
    forward   the stand-in -> y        wait
    backward  dy -> dx, not yet there  start the adjoint
    """

    @staticmethod
    def forward(ctx, link: Tensor, way: _Way) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.way = way
        return way.arrived()

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
        ctx.way.pending = ctx.way.back(dy)
        return ctx.way.pending.result, None


def begin_all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group, purpose: str) -> Begun:
    """As `start_all_to_all`, differentiable; the adjoint sends each row back."""
    return Begun(
        x,
        lambda t: start_all_to_all(t, sent, received, group, purpose),
        lambda t: start_all_to_all(t, received, sent, group, purpose),
    )


def begin_all_gather(x: Tensor, group: Group, purpose: str) -> Begun:
    """As `start_all_gather`, differentiable; the adjoint is a reduce-scatter."""
    return Begun(x, lambda t: start_all_gather(t, group, purpose), lambda t: start_reduce_scatter(t, group, purpose))


def begin_reduce_scatter(x: Tensor, group: Group, purpose: str) -> Begun:
    """As `start_reduce_scatter`, differentiable; the adjoint is an all-gather."""
    return Begun(x, lambda t: start_reduce_scatter(t, group, purpose), lambda t: start_all_gather(t, group, purpose))


def joined(parts: Tensor, dim: int) -> Tensor:
    """(n, .., s, ..) -> (.., n*s, ..): parts side by side along dim of the result."""
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def parted(x: Tensor, n: int, dim: int) -> Tensor:
    """(.., n*s, ..) -> (n, .., s, ..): the inverse of `joined`."""
    return x.unflatten(dim, (n, -1)).movedim(dim, 0)


def gather_objects(value: T, group: Group, purpose: str) -> list[T]:
    """`value` of every rank of the group, in order. For reports before and after training, so it is not counted."""
    if group.size == 1:
        return [value]
    group.ledger.last = group.ledger.meet(group.axis, group.ranks, purpose, "all_gather")
    values: list[T | None] = [None] * group.size
    dist.all_gather_object(values, value, group=group.process_group)
    return values  # type: ignore[return-value]


def _meet(group: Group, purpose: str, op: str, elements: Fraction, like: Tensor) -> Meeting:
    _count(group, purpose, op, elements, like)
    return group.ledger.meet(group.axis, group.ranks, purpose, op)


def _count(group: Group, purpose: str, op: str, elements: Fraction, like: Tensor) -> None:
    group.ledger.count(group.axis, purpose, op, elements * like.element_size())


@contextmanager
def _waiting(group: Group, meeting: Meeting, device: torch.device) -> Iterator[None]:
    with record_function(f"wait for {group.axis}"), group.ledger.waiting(meeting, device):
        yield
