"""The plan: each pair of a query and a key that it sees is computed once, on one rank; work, and what travels."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from research.parallel.cp import starts
from research.parallel.cp.plan import Block, Visible, blocks, held, make_plan, positions

BALANCES = ["none", "zigzag", "striped"]


def document_starts(alike, samples=3, sequence=48):
    """Documents of some five tokens, or of one."""
    generator = np.random.default_rng(0)
    begins = generator.random((samples, sequence)) < 0.2
    begins[:, 20:24] = True
    documents = np.repeat(begins[:1], samples, 0) if alike else begins
    return starts(torch.from_numpy(documents.cumsum(1))).numpy()


def computed(blocks, queries, keys, where):
    """Add the pairs of some blocks to `where` (B, queries, S); `keys` are the positions of those that they may meet."""
    for b in blocks:
        rows, columns = np.arange(queries)[b.queries], keys[b.keys]
        square = np.ones((len(rows), len(columns)), int)
        if b.kind != "full":
            triangle = np.tril(np.ones((len(rows) // b.tiles,) * 2, int))
            square = np.kron(np.eye(b.tiles, dtype=int), triangle if b.kind == "causal" else triangle.T)
        assert square.sum() == b.pairs
        for sample in where[b.samples]:
            sample[np.ix_(rows, columns)] += square


@pytest.mark.parametrize("documents", ["none", "alike", "different"])
@pytest.mark.parametrize("window", [0, 1, 2, 3, 7, 20, 100])
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_every_pair_once(n, balance, window, documents, samples=3, sequence=48):
    begins = None if documents == "none" else document_starts(documents == "alike")
    plans = [make_plan(n, rank, balance, sequence, window, begins) for rank in range(n)]
    places = [positions(held(balance, sequence, n, rank)) for rank in range(n)]
    assert sorted(np.concatenate(places)) == list(range(sequence))
    for plan, mine in zip(plans, places, strict=True):
        assert plan.routes == plans[0].routes and (np.diff(mine) > 0).all()
        got = np.zeros((samples, len(mine), sequence), int)
        computed(plan.own, len(mine), mine, got)
        for route, met in zip(plan.routes, plan.met, strict=True):
            assert not met or 0 < plan.hop(route) <= route.hops  # what is met has come
            computed(met, len(mine), places[route.owner][route.keys], got)
        queries, keys = mine[:, None], np.arange(sequence)
        seen = (keys <= queries) & (keys > queries - (window or sequence))
        want = np.broadcast_to(seen, got.shape) if begins is None else seen & (keys >= begins[:, mine, None])
        np.testing.assert_array_equal(got, want)


def efficiency(balance, n, each=512):
    """Mean work over the most of any rank."""
    pairs = [make_plan(n, rank, balance, n * each).pairs for rank in range(n)]
    assert sum(pairs) == n * each * (n * each + 1) // 2
    return Fraction(sum(pairs), n * max(pairs))


@pytest.mark.parametrize("n", [2, 3, 8])
def test_work_by_formula(n, each=512):
    """A plain ring waits for its last rank, n/(2n - 1) for long samples; the others are even."""
    assert efficiency("none", n) == Fraction(n * each + 1, (2 * n - 1) * each + 1)
    assert efficiency("zigzag", n) == 1
    assert efficiency("striped", n) == Fraction(n * each + 1, n * each + n)


def test_plain_ring_on_8_ranks():
    """ring-flash-attention, README: (P/2)/(P - 1/2)."""
    assert round(float(efficiency("none", 8, 4096)), 3) == 0.533


@pytest.mark.parametrize("n", [2, 3, 8])
def test_what_comes_by_formula(n, each=64):
    """Blocks that nobody on the way sees do not travel."""
    plans = {b: [make_plan(n, rank, b, n * each) for rank in range(n)] for b in BALANCES}
    received = {b: [Fraction(p.received(), each) for p in plans[b]] for b in BALANCES}
    assert received["none"] == list(range(n))
    assert received["zigzag"] == [Fraction(n - 1 + n - 1 - rank, 2) for rank in range(n)]
    last_key = Fraction(1, each)  # of the last rank: nobody else sees it
    assert received["striped"] == [n - 1 - (last_key if rank < n - 1 else 0) for rank in range(n)]


def test_a_window_lets_little_travel(n=8, each=64):
    for window, hops in ((17, 1), (65, 1), (66, 2), (100, 2)):
        plans = [make_plan(n, rank, "none", n * each, window) for rank in range(n)]
        assert [p.received() for p in plans] == [min(rank, hops) * min(window - 1, each) for rank in range(n)]


def test_documents_that_end_with_a_part_let_nothing_travel(n=4, each=8):
    begins = np.arange(n * each)[None] // each * each
    for rank in range(n):
        plan = make_plan(n, rank, "none", n * each, 0, begins)
        assert plan.routes == () and plan.own == (Block(slice(None), slice(0, each), slice(0, each), "causal"),)


def test_few_blocks():
    """A band is two tiled triangles, whatever its length; documents that end together are one block each."""
    rows = np.arange(1000)
    band = list(blocks(Visible(slice(None), np.maximum(rows - 9, 0), rows + 1)))
    assert len(band) == 3 and max(b.tiles for b in band) == 110
    plan = make_plan(1, 0, "none", 60, 0, np.repeat(np.arange(3) * 20, 20)[None])
    assert [(b.queries, b.kind) for b in plan.own] == [(slice(i, i + 20), "causal") for i in (0, 20, 40)]
