"""Messages between ranks of a group, the even all-to-all, and sums in bfloat16: values, gradient, bytes."""

from fractions import Fraction
from functools import partial

import pytest
import torch

from research import comm
from research.config import LaunchConfig
from research.launch.local import RankError, start
from research.ledger import Meeting
from research.mesh import Mesh


def bodies(body, ranks, limit_s=30.0):
    return start(lambda place, device: body(Mesh({"cp": ranks}, place.rank)), ranks, LaunchConfig(threads=1), limit_s)


def both_ways_round(mesh):
    """A number of one element up, one of two elements down, and where there are two ranks both meet the same peer."""
    group = mesh.group("cp")
    up, down = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    from_below, from_above = torch.empty(1), torch.empty(2)
    mine = float(group.rank)
    sends = [(torch.full((1,), mine), up), (torch.full((2,), 10 + mine), down)]
    pending = comm.start_exchange(sends, [(from_below, down), (from_above, up)], group, "numbers")
    received = [t.tolist() for t in pending.wait()]
    nothing = comm.start_exchange([], [], group, "nothing").wait()
    return group.rank, received, nothing, dict(mesh.ledger.bytes)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_exchange(ranks):
    for rank, received, nothing, counted in bodies(both_ways_round, ranks):
        assert received == [[(rank - 1) % ranks], [10 + (rank + 1) % ranks] * 2] and nothing == []
        assert counted == {("cp", "numbers", "exchange", "setup"): 3 * 4}


def one_sender(mesh):
    group = mesh.group("cp")
    buffer = torch.empty(3)
    send = [(torch.arange(3.0), 1)] if group.rank == 0 else []
    pending = comm.start_exchange(send, [(buffer, 0)] if group.rank == 1 else [], group, "numbers")
    assert mesh.ledger.last is None  # started, not waited for
    pending.wait()
    return buffer.tolist(), mesh.ledger


def test_some_ranks_send_and_some_receive():
    """All have started one exchange, so that nobody misses the one that had no part in it."""
    received, ledgers = zip(*bodies(one_sender, 3), strict=True)
    assert received[1] == [0.0, 1.0, 2.0] and [sum(ledger.bytes.values()) for ledger in ledgers] == [0, 12, 0]
    assert all(ledger.started == {("cp", (0, 1, 2)): 1} for ledger in ledgers)
    waited = Meeting("cp", "numbers", "exchange", (0, 1, 2), 1)
    assert [ledger.last for ledger in ledgers] == [waited, waited, None]


def turned(mesh):
    group = mesh.group("cp")
    n, rank = group.size, group.rank
    x = (torch.arange(n * 2).view(n, 2) + 100.0 * rank).requires_grad_()
    y = comm.all_to_all(x, group, "parts")
    y.backward(torch.arange(n * 2).view(n, 2) + 1000.0 * rank)
    return rank, y.detach(), x.grad, dict(mesh.ledger.bytes)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_to_all_and_its_adjoint(ranks):
    for rank, y, grad, counted in bodies(turned, ranks):
        mine, each = torch.tensor([2.0 * rank, 2.0 * rank + 1]), torch.arange(float(ranks))[:, None]
        assert torch.equal(y, mine + 100 * each) and torch.equal(grad, mine + 1000 * each)
        received = Fraction((ranks - 1) * ranks * 2 * 4, ranks)
        assert counted == ({("cp", "parts", "all_to_all", "setup"): 2 * received} if ranks > 1 else {})


def summed(mesh):
    """Each rank has 256 in some places and 1 in others."""
    x = torch.where(torch.arange(100) % 5 == mesh.rank, 256, 1).bfloat16()
    return comm.all_reduce_(x, mesh.group("cp"), "numbers").tolist(), sum(mesh.ledger.bytes.values())


def test_a_sum_in_bfloat16_rounds_once():
    """256 + 1 + 1 + 1 + 1, rounded at every hop, stays 256 or comes to 258."""
    assert bodies(summed, 5) == [([260.0] * 100, 2 * 4 * 20 * 2)] * 5


STARTS = {
    "all_gather": lambda x, group: comm.start_all_gather(x[0], group, "numbers"),
    "reduce_scatter": lambda x, group: comm.start_reduce_scatter(x, group, "numbers"),
    "all_to_all": lambda x, group: comm.start_all_to_all(x, [1] * group.size, [1] * group.size, group, "numbers"),
}


def dropped(name, mesh):
    """The second of two that nobody waits for, as a recompute that stops early leaves one, then a third."""
    group = mesh.group("cp")
    parts = [torch.full((group.size, 1000), 10.0 * i + group.rank) for i in range(3)]
    first = STARTS[name](parts[0], group)
    STARTS[name](parts[1], group)
    first.wait()
    return STARTS[name](parts[2], group).wait()[..., 0].tolist()


@pytest.mark.parametrize("name", STARTS)
def test_a_collective_that_nobody_waits_for_takes_nothing_of_the_next(name):
    found = bodies(partial(dropped, name), 3)
    assert found == [63.0 if name == "reduce_scatter" else [20.0, 21.0, 22.0]] * 3


def test_planted_messages_for_a_collective(monkeypatch):
    """One that nobody receives any more is taken for the next."""

    def by_messages(x, group):
        others = [r for r in range(group.size) if r != group.rank]
        out = torch.stack([x[0]] * group.size)
        return comm.start_exchange([(x[r], r) for r in others], [(out[r], r) for r in others], group, "numbers")

    monkeypatch.setitem(STARTS, "all_to_all", by_messages)
    with pytest.raises((TimeoutError, RankError)):
        bodies(partial(dropped, "all_to_all"), 3, limit_s=8.0)
