"""The seam of expert parallelism under every load, tokens in any number on any rank, against that of one device."""

import itertools

import pytest
import torch

from research.config import LaunchConfig
from research.launch.local import start
from research.mesh import Mesh
from research.models import seams
from research.models.pointwise import weighted_swiglu
from research.models.products import Products
from research.parallel.ep import dispatch

E, K, D, F = 4, 2, 6, 8
TOKENS = {
    "as many everywhere": [5, 5, 5, 5],
    "uneven": [7, 1, 0, 3],
    "one token": [0, 0, 1, 0],
    "none": [0, 0, 0, 0],
}
CHOICES = {  # of T tokens: (T, K) experts; E is dropped
    "as it comes": lambda g, t: torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(t)] or [torch.empty(K)]),
    "all on one": lambda g, t: torch.tensor([[2, E]]).repeat(t, 1),
    "one expert idle": lambda g, t: torch.tensor([[0, 3]]).repeat(t, 1),
    "some dropped": lambda g, t: torch.randint(0, E + 1, (t, K), generator=g),
    "all dropped": lambda g, t: torch.full((t, K), E),
}
WAYS = list(itertools.product(dispatch.DISPATCH, [1, 3], [1, 2]))  # dispatch, pieces, parts of an expert


def case(tokens, choices):
    """x, ids, weights of all tokens, and the experts, the same on every rank."""
    g = torch.Generator().manual_seed(0)
    total = sum(tokens)
    ids = CHOICES[choices](g, total)[:total].to(torch.int64)
    shapes = [(total, D), (total, K), (E, F, D), (E, F, D), (E, D, F)]
    x, weights, *experts = (torch.randn(s, generator=g, dtype=torch.float64) for s in shapes)
    return x, ids, weights, experts


def held(mesh, gate, up, down):
    """The experts of a rank, or its part of them."""
    experts, parts = mesh.sizes["ep"], mesh.sizes["etp"]
    gate, up, down = (t.chunk(experts)[mesh.at["ep"]] for t in (gate, up, down))
    return [t.chunk(parts, dim)[mesh.at["etp"]] for t, dim in ((gate, 1), (up, 1), (down, 2))]


def outcome(seam, x, ids, weights, experts):
    """Output and gradients of x, of the weights and of each expert's matrices."""
    leaves = [t.clone().requires_grad_() for t in (x, weights, *experts)]
    x, weights, gate, up, down = leaves
    product = Products().grouped

    def routed(rows, counts, of_rows):
        return product(weighted_swiglu(product(rows, gate, counts), product(rows, up, counts), of_rows), down, counts)

    y, beside = seam(x, ids, weights, E, routed, lambda: x * 2, drops=True)
    return [y.detach(), *torch.autograd.grad((y * y + y).sum() + beside.sum(), leaves)]


def errors(place, device):
    """The largest relative error of every case, on one of four ranks."""
    torch.use_deterministic_algorithms(True)  # fresh memory is NaN
    worst = {}
    for (name, pieces, parts), tokens, choices in itertools.product(WAYS, TOKENS, CHOICES):
        mesh = Mesh({"dp": 4, "ep": 4 // parts, "etp": parts}, place.rank)
        seam = dispatch.experts(dispatch.DISPATCH[name](mesh.group("experts"), parts), pieces)
        x, ids, weights, experts = case(TOKENS[tokens], choices)
        mine = slice(sum(TOKENS[tokens][: place.rank]), sum(TOKENS[tokens][: place.rank + 1]))
        got = outcome(seam, x[mine], ids[mine], weights[mine], held(mesh, *experts))
        y, dx, dweights, *dexperts = outcome(seams.experts, x, ids, weights, experts)
        want = [y[mine], dx[mine], dweights[mine], *held(mesh, *dexperts)]
        relative = [(a - b).norm() / (1 + b.norm()) for a, b in zip(got, want, strict=True)]
        worst[name, pieces, parts, tokens, choices] = float(torch.stack(relative).max())
    return worst


@pytest.mark.timeout(120)
def test_every_load():
    ranks = start(errors, 4, LaunchConfig(threads=1), 100.0)
    wrong = {key: error for worst in ranks for key, error in worst.items() if not error < 1e-12}
    assert len(ranks[0]) == 160 and not wrong
