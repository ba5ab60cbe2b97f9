"""The `experts` seam over ranks: who goes where, there and back. See README.md beside this file.

A rank of the group (`Mesh.group("experts")`) holds e experts, whole or one part of each (`ep.tensor`). To a token the
parts of an expert are experts of their own, which it chooses together, and whose outputs add up like those of other
choices: whole experts are the case of one part.

T tokens of this rank, D model, E experts, K top-k, P parts of an expert, n = (E/e)*P ranks of the group, e experts of a
rank, C pieces in which tokens travel (`ep.overlap`), N rows that leave, M rows that arrive
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from research import comm
from research.mesh import Group
from research.models.kernels import spread
from research.models.recompute import Keep, decide
from research.models.seams import Choices, Routed, Seam, count, sorted_choices


class Plan(Protocol):
    """Where the tokens of one piece go. It is made once, and repeated where a layer is run again."""

    def send(self, x: Tensor, weights: Tensor) -> comm.Begun:
        """x (T, D), weights (T, K) set out for their experts, as one message."""
        ...

    def answer(self, coming: comm.Begun, routed: Routed) -> comm.Begun:
        """What has arrived passes the experts of this rank and sets out for where it came from."""
        ...

    def receive(self, going: comm.Begun) -> Tensor:
        """(T, D): the sum over each token's choices."""
        ...


Planner = Callable[[Sequence[Tensor], int], Sequence[Plan]]  # ids (T, K) of each piece, E -> the plan of each piece


def experts(planner: Planner, pieces: int) -> Seam:
    """The seam. All pieces set out before the first one is waited for; the shared expert runs meanwhile, and the
    experts work on a piece while others travel. In backward it is the same, see `comm.Begun`."""

    def over_ranks(
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        n_experts: int,
        routed: Routed,
        shared: Callable[[], Tensor | None],
        drops: bool = False,
        keep: Keep = decide,
    ) -> tuple[Tensor, Tensor | None]:
        plans = keep(lambda: planner(_cut(ids, pieces), n_experts))
        parts = zip(plans, _cut(x, pieces), _cut(weights.to(x.dtype), pieces), strict=True)
        coming = [plan.send(x, weights) for plan, x, weights in parts]
        beside = shared()
        going = [plan.answer(rows, routed) for plan, rows in zip(plans, coming, strict=True)]
        outputs = [plan.receive(rows) for plan, rows in zip(plans, going, strict=True)]
        return outputs[0] if pieces == 1 else torch.cat(outputs), beside

    return over_ranks


def _cut(x: Tensor, pieces: int) -> Sequence[Tensor]:
    """(T, ..) -> runs of tokens, whose lengths differ by one at most."""
    return (x,) if pieces == 1 else x.split([len(part) for part in x.tensor_split(pieces)])


@dataclass(frozen=True)
class AllToAll:
    """Each choice is sent to the ranks that hold its expert, and nowhere else."""

    group: Group
    parts: int  # of an expert
    choices: Choices  # of n*e parts of experts, in the order of ranks
    sent: Sequence[int]  # rows for each rank
    received: Sequence[int]  # rows of each rank
    counts: Tensor  # (e,) rows of each expert of this rank
    order: Tensor  # (M,) of rows that arrived rank by rank, that which is expert by expert
    places: Tensor  # (M,) its inverse

    def send(self, x: Tensor, weights: Tensor) -> comm.Begun:
        weights = weights[..., None].expand(-1, -1, self.parts).flatten(1)
        leaving = self.choices.weighted_rows(x, weights)
        return comm.begin_all_to_all(leaving, self.sent, self.received, self.group, "dispatch")

    def answer(self, coming: comm.Begun, routed: Routed) -> comm.Begun:
        arrived = coming.wait()
        rows, weights = (spread(t, self.order, self.places) for t in arrived.split([arrived.shape[1] - 1, 1], 1))
        y = spread(routed(rows, self.counts, weights[:, 0]), self.places, self.order)
        return comm.begin_all_to_all(y, self.received, self.sent, self.group, "combine")

    def receive(self, going: comm.Begun) -> Tensor:
        return self.choices.sums(going.wait())


def all_to_all(group: Group, parts: int) -> Planner:
    """Ranks tell each other how many rows they send, of all pieces at once, which the host must know as well."""

    def plan(ids: Sequence[Tensor], n_experts: int) -> Sequence[Plan]:
        each = n_experts * parts // group.size
        ids = [_of_parts(i, n_experts, each, parts) for i in ids]
        counts = torch.stack([count(i, group.size * each + 1)[:-1] for i in ids])
        leaving = counts.unflatten(1, (group.size, each)).movedim(1, 0)  # (n, C, e)
        one_each = [1] * group.size
        arriving = comm.start_all_to_all(leaving, one_each, one_each, group, "expert loads").wait()
        sent, received = torch.stack([leaving, arriving]).sum(-1).movedim(-1, 1).tolist()  # the one host sync
        return [
            AllToAll(
                group,
                parts,
                sorted_choices(ids[c], counts[c], sum(sent[c])),
                sent[c],
                received[c],
                arriving[:, c].sum(0),
                *regrouped(arriving[:, c], sum(received[c])),
            )
            for c in range(len(ids))
        ]

    return plan


def _of_parts(ids: Tensor, n_experts: int, each: int, parts: int) -> Tensor:
    """ids (T, K) of E experts, E where dropped -> (T, K*P) of their parts, E*P where dropped: rank by rank, so that the
    first parts of e experts stand before the second ones."""
    first = ids // each * (parts * each) + ids % each
    rest = torch.arange(parts, device=ids.device) * each
    return (first[..., None] + rest).flatten(1).clamp(max=n_experts * parts)


def regrouped(counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """counts (n, e) of `total` rows that stand rank by rank, and of each rank expert by expert -> the order (M,) that
    is expert by expert, and its inverse. A run of rows moves as one, so nothing is sorted."""
    by_rank = _starts(counts)
    by_expert = _starts(counts.T).T
    moves = by_rank - by_expert
    here = torch.arange(total, device=counts.device)
    order = here + moves.T.flatten().repeat_interleave(counts.T.flatten(), output_size=total)
    places = here - moves.flatten().repeat_interleave(counts.flatten(), output_size=total)
    return order, places


def _starts(counts: Tensor) -> Tensor:
    """Where each run begins, of runs that stand in the order of the flattened counts."""
    return (counts.flatten().cumsum(0) - counts.flatten()).view(counts.shape)


@dataclass(frozen=True)
class AllGather:
    """Every rank gets all tokens of the group, and adds up what its own experts make of them."""

    group: Group
    choices: Choices  # of the e experts of this rank, by the tokens of all ranks
    each: int  # choices of a token: K
    tokens: int  # of this rank
    most: int  # of a rank: others are filled up with tokens that choose nothing

    def send(self, x: Tensor, weights: Tensor) -> comm.Begun:
        return comm.begin_all_gather(_filled(torch.cat([x, weights], 1), self.most), self.group, "dispatch")

    def answer(self, coming: comm.Begun, routed: Routed) -> comm.Begun:
        arrived = coming.wait().flatten(0, 1)
        x, weights = arrived.split([arrived.shape[1] - self.each, self.each], 1)
        y = routed(self.choices.rows(x), self.choices.counts, self.choices.weights(weights))
        sums = self.choices.sums(y).unflatten(0, (self.group.size, self.most))
        return comm.begin_reduce_scatter(sums, self.group, "combine")

    def receive(self, going: comm.Begun) -> Tensor:
        y = going.wait()
        return y if self.tokens == self.most else y[: self.tokens]


def all_gather(group: Group, parts: int) -> Planner:
    """Ranks tell each other what their tokens chose; the host must know how many tokens come, and how many rows."""

    def plan(ids: Sequence[Tensor], n_experts: int) -> Sequence[Plan]:
        each = n_experts * parts // group.size
        low = group.rank // parts * each
        counts = torch.stack([count(i, n_experts + 1) for i in ids])
        loads = comm.start_all_gather(counts, group, "expert loads").wait()  # (n, C, E+1)
        own = loads[..., low : low + each].sum(0)  # (C, e)
        of_ranks, rows = loads.sum(-1).amax(0), own.sum(-1)
        chosen, kept = torch.stack([of_ranks, rows]).tolist()  # the one host sync
        most = [n // ids[0].shape[1] for n in chosen]
        filled = [_filled(i.int(), n, n_experts) for i, n in zip(ids, most, strict=True)]
        coming = [comm.start_all_gather(i, group, "dispatch") for i in filled]
        plans = []
        for c, gathered in enumerate(coming):
            mine = gathered.wait().flatten(0, 1) - low
            mine = mine.where((mine >= 0) & (mine < each), each)
            plans.append(AllGather(group, sorted_choices(mine, own[c], kept[c]), mine.shape[1], len(ids[c]), most[c]))
        return plans

    return plan


def _filled(t: Tensor, tokens: int, value: int = 0) -> Tensor:
    """(T, ..) -> (tokens, ..)"""
    return t if len(t) == tokens else F.pad(t, (0, 0, 0, tokens - len(t)), value=value)


DISPATCH = {"all_to_all": all_to_all, "all_gather": all_gather}
