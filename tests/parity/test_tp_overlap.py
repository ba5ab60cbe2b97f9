"""What overlap hides of the travel of `column` and `row`, by the ledger's waiting time, on a link and a clock of tests.
One process stands for a rank of two: its collectives carry nothing."""

import pytest
import torch

from research import comm
from research.launch.process import fake_process_group
from research.mesh import Mesh
from research.models.products import Products
from research.parallel.tp import products
from tests.parity.link import Link

S, D = 8, 4  # tokens of one sample, half of them this rank's with sequence parallelism, and all widths
PRODUCT = 8  # seconds of one with all tokens
GATHER, SCATTER, REDUCE = 8, 4, 8  # seconds of travel: the rows that come to this rank
SEAMS = {  # tokens that go in, and the seam of a group, for so many pieces
    "column": (S // 2, lambda group, pieces: products.column(group, Products(), pieces, False)),
    "column, inputs kept": (S // 2, lambda group, pieces: products.column(group, Products(), pieces, True)),
    "row": (S, lambda group, pieces: products.row(group, Products(), True, pieces)),
    "row without sequence": (S, lambda group, pieces: products.row(group, Products(), False, pieces)),
}
TRAVEL = {  # in forward and in backward
    "column": (GATHER, GATHER + SCATTER),
    "column, inputs kept": (GATHER, SCATTER),
    "row": (SCATTER, GATHER),
    "row without sequence": (REDUCE, REDUCE),
}


def timed(link, real):
    def product(first, *others):
        link.now += PRODUCT * first.shape[1] / S
        return real(first, *others)

    return product


@pytest.fixture
def exposed(monkeypatch):
    """Seconds of a seam's forward, and of its backward, in which a rank waits."""

    def run(name, pieces):
        tokens, seam = SEAMS[name]
        with monkeypatch.context() as patch, fake_process_group(2, 0):
            link, mesh = Link(patch, D), Mesh({"tp": 2}, fake=True)
            for product in ("linear", "weight_gradient"):
                patch.setattr(products, product, timed(link, getattr(products, product)))
            x, w = torch.ones(1, tokens, D, requires_grad=True), torch.ones(D, D, requires_grad=True)
            y = seam(mesh.group("tp"), pieces)(x, w)
            forward = mesh.ledger.settle()
            (y if isinstance(y, torch.Tensor) else y[0]).sum().backward()
            waited = tuple(sum(w.values()) / 1e3 for w in (forward, mesh.ledger.settle()))
            assert link.now == 3 * PRODUCT + sum(waited)
        return waited

    return run


@pytest.mark.parametrize("pieces", [1, 2, 4])
@pytest.mark.parametrize("name", SEAMS)
def test_only_the_first_or_the_last_piece_is_waited_for(exposed, name, pieces):
    """And in backward of `column` none: the gradient of inputs travels beside that of weights, for which inputs are
    gathered beside the other product."""
    forward, backward = TRAVEL[name]
    assert exposed(name, pieces) == (forward / pieces, 0 if name.startswith("column") else backward / pieces)


@pytest.mark.parametrize("name", SEAMS)
def test_planted_wait_right_after_start(exposed, monkeypatch, name):
    class Waited(comm.Pending):
        def __init__(self, *args):
            super().__init__(*args)
            self.wait()

    monkeypatch.setattr(comm, "Pending", Waited)
    assert exposed(name, 4) == TRAVEL[name]


@pytest.mark.parametrize("name, left", [("column", SCATTER), ("column, inputs kept", SCATTER / 4)])
def test_planted_wait_for_the_gradient_of_inputs_before_that_of_weights(exposed, monkeypatch, name, left):
    """What comes last is waited for: all sums behind the inputs that are gathered again, or the last one."""
    real = products._started_sums

    def arrived(*args):
        sums = real(*args)
        products._arrived(sums)
        return sums

    monkeypatch.setattr(products, "_started_sums", arrived)
    assert exposed(name, 4) == (GATHER / 4, left)


@pytest.mark.parametrize("name, waited", [("column", (GATHER, 0)), ("row", (SCATTER / 4, GATHER))])
def test_planted_gather_behind_the_product_of_the_piece_before(exposed, monkeypatch, name, waited):
    real = products._gathered_product

    def one_by_one(x, group, purpose, pieces, weights):
        runs = [real(piece, group, purpose, 1, weights) for piece in x.chunk(pieces, 1)]
        outputs = [products._whole(part, group.size) for part in zip(*(y for _, y in runs), strict=True)]
        return products._whole([x for x, _ in runs], group.size), outputs

    monkeypatch.setattr(products, "_gathered_product", one_by_one)
    assert exposed(name, 4) == waited
