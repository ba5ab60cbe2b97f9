"""What overlap hides of expert parallelism's travel, by the ledger's waiting time, on a link and a clock of tests."""

import pytest
import torch

from research import comm
from research.config import LaunchConfig
from research.launch.local import start
from research.mesh import Mesh
from research.parallel.ep import dispatch
from tests.parity.link import Link

D, T = 4, 8  # width and number of a rank's tokens, which choose one expert each: every other one that of this rank
SHARED, EXPERTS = 3, 8  # seconds of work in forward, and in backward, of a rank
WAY = {"all_to_all": 8, "all_gather": 16}  # seconds there, or back: the rows of a rank, or of both


class Work(torch.autograd.Function):
    """(..) -> (..) as it is, after so many seconds; so is backward."""

    @staticmethod
    def forward(ctx, x, link, seconds):
        ctx.about = link, seconds
        link.now += seconds
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        link, seconds = ctx.about
        link.now += seconds
        return dy, None, None


def exposed(link, way, pieces, place):
    """Seconds of one layer's forward and backward in which a rank waits."""
    mesh = Mesh({"dp": 2, "ep": 2}, place.rank)
    seam = dispatch.experts(dispatch.DISPATCH[way](mesh.group("experts"), 1), pieces)
    x, weights = torch.ones(T, D, requires_grad=True), torch.ones(T, 1, requires_grad=True)

    def routed(rows, counts, weights):
        return Work.apply(rows, link, EXPERTS * len(rows) / T) * weights[:, None]

    y, beside = seam(x, torch.arange(T)[:, None] % 2, weights, 2, routed, lambda: Work.apply(x, link, SHARED))
    forward = mesh.ledger.settle()
    (y + beside).sum().backward()
    return [sum(waited.values()) / 1e3 for waited in (forward, mesh.ledger.settle())]


class Waited(comm.Begun):
    """Planted: each collective is waited for where it starts."""

    def __init__(self, *args):
        super().__init__(*args)
        self.result = super().wait()

    def wait(self):
        return self.result


def early(planner, pieces, real=dispatch.experts):
    """Planted: the shared expert runs before tokens leave."""

    def seam(x, ids, weights, n_experts, routed, shared):
        beside = shared()
        return real(planner, pieces)(x, ids, weights, n_experts, routed, lambda: beside)

    return seam


def one_by_one(planner, pieces, real=dispatch.experts):
    """Planted: a piece leaves once the one before is back."""

    def seam(x, ids, weights, n_experts, routed, shared):
        runs = zip(x.chunk(pieces), ids.chunk(pieces), weights.chunk(pieces), strict=True)
        y = [real(planner, 1)(*run, n_experts, routed, lambda: None)[0] for run in runs]
        return torch.cat(y), shared()

    return seam


@pytest.fixture
def hidden(monkeypatch):
    """Seconds of a layer's travel that pass unnoticed, in forward and in backward, the same on both ranks."""

    def run(way, pieces):
        with monkeypatch.context() as patch:
            link, one_each = Link(patch, D), LaunchConfig(threads=1)
            (forward, backward), other = start(lambda place, _: exposed(link, way, pieces, place), 2, one_each, 60.0)
        assert other == [forward, backward]
        return 2 * WAY[way] - forward, 2 * WAY[way] - backward

    return run


@pytest.mark.parametrize("way", WAY)
def test_all_work_beside_is_hidden(hidden, way):
    """The shared expert's; and with pieces also that of the experts, who need not wait for the last one."""
    assert hidden(way, 1) == (SHARED, SHARED)
    assert hidden(way, 4) == (SHARED + EXPERTS, SHARED + EXPERTS)


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("way", WAY)
def test_planted_wait_right_after_start(hidden, monkeypatch, way, pieces):
    monkeypatch.setattr(comm, "Begun", Waited)
    assert hidden(way, pieces) == (0, 0)


@pytest.mark.parametrize("planted, left", [(early, EXPERTS), (one_by_one, 0)])
def test_planted_order_that_hides_less(hidden, monkeypatch, planted, left):
    monkeypatch.setattr(dispatch, "experts", planted)
    assert hidden("all_to_all", 4) == (left, left)
