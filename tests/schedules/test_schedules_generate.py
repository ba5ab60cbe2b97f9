"""Every schedule at every size: torch's order where torch has one, valid everywhere, refused by name and number."""

import itertools
import time

import pytest

from research.parallel.pp.check import check, peaks
from research.parallel.pp.generate import FAMILIES, generate, refusals
from research.parallel.pp.simulate import even, simulate
from research.train.action import Overlap
from tests.schedules.torch_order import MULTI, SINGLE, order

SLOW = pytest.mark.slow
SIZES = [
    pytest.param((1, 2, 3, 4, 8), (1, 2, 3, 4, 7, 8, 9, 17, 32), id="some"),
    pytest.param(range(1, 9), range(1, 33), id="all", marks=SLOW),
]


def per_ranks(name):
    fixed = FAMILIES[name].per_rank
    return (1, 2, 3, 4) if fixed is None else (fixed,)


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("name", FAMILIES)
def test_whatever_is_not_refused_passes(name, ranks, microbatches):
    """And nothing is refused but odd ranks of DualPipe."""
    for p, v, m in itertools.product(ranks, (1, 2, 3, 4), microbatches):
        if v not in per_ranks(name) or (name == "dualpipe" and p % 2):
            with pytest.raises(ValueError, match="legal"):
                generate(name, p, m, v)
            continue
        schedule = generate(name, p, m, v)
        stages = p * v // (2 if name == "dualpipe" else 1)
        assert (schedule.ranks, schedule.stages, schedule.microbatches) == (p, stages, m)
        assert all(len(held) == v for held in schedule.holds)
        check(schedule)


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("name", [*SINGLE, *MULTI])
def test_order_is_torchs(name, ranks, microbatches):
    compared = 0
    for p, v, m in itertools.product(ranks, per_ranks(name), microbatches):
        if name == "1f1b" and m < p:  # torch refuses it elsewhere
            continue
        try:
            wanted = order(name, p, m, v)
        except ValueError:
            continue
        compared += 1
        assert generate(name, p, m, v).actions == wanted, (p, v, m)
    assert compared >= 20


def test_zb_h1_is_interleaved_zero_bubble_of_one_stage():
    for p, m in itertools.product(range(1, 9), (1, 3, 8, 24)):
        if m % max(1, m // p) == 0:  # else torch refuses it
            assert generate("zb_h1", p, m).actions == order("interleaved_zb", p, m)


def test_dualpipe_is_dualpipe_v_from_both_ends():
    """Half of DualPipe's ranks do what DualPipeV's do, in another numbering (DualPipe's README)."""
    for half, each in ((1, 4), (2, 8), (3, 14)):
        both, v = generate("dualpipe", 2 * half, 2 * each), generate("dualpipe_v", half, each)
        for rank in (*range(half), *range(half, 2 * half)):
            near = min(rank, 2 * half - 1 - rank)
            kinds = [[a.kind for a in s.flat(r)] for s, r in ((both, rank), (v, near))]
            assert kinds[0] == kinds[1]
            pairs = [[isinstance(e, Overlap) for e in entries] for entries in (both.actions[rank], v.actions[near])]
            assert pairs[0] == pairs[1]


def test_placement():
    assert generate("interleaved", 2, 4, 3).holds == ((0, 2, 4), (1, 3, 5))
    assert generate("zbv", 3, 4).holds == ((0, 5), (1, 4), (2, 3))
    assert generate("dualpipe", 4, 8).holds == ((0, 3), (1, 2), (2, 1), (3, 0))
    below = {a.microbatch for a in generate("dualpipe", 4, 8).flat(0) if a.stage == 0}
    assert below == {0, 1, 2, 3}  # the others enter at the last rank


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (("zbw", 4, 8), "schedule=zbw is unknown; legal: gpipe, 1f1b, interleaved"),
        (("1f1b", 0, 8), "ranks=0 is out of range; legal: an integer, at least 1"),
        (("1f1b", 4, -1), "microbatches=-1 is out of range; legal"),
        (("interleaved", 4, 8, 0), "stages per rank=0 is out of range; legal"),
        (("1f1b", 4, 8, 2), "stages per rank=2 does not fit schedule=1f1b; legal: 1"),
        (("zbv", 4, 8, 1), "stages per rank=1 does not fit schedule=zbv; legal: 2"),
        (("dualpipe", 3, 12), "ranks=3 must be a multiple of 2 for schedule=dualpipe; legal: 2, 4, 6"),
    ],
)
def test_refusals_name_key_value_and_legal_values(asked, told):
    with pytest.raises(ValueError, match=told):
        generate(*asked)


def test_all_that_is_wrong_is_told_at_once():
    assert len(refusals("dualpipe", 3, 0, 4)) == 3


@pytest.mark.parametrize("name", ["zbv", "v_half", "v_min"])
def test_v_shapes_keep_the_promised_peak_at_every_number_of_ranks(name):
    """And with few microbatches no more than these can make."""
    promised = {"zbv": lambda p: p, "v_half": lambda p: (p + 2) // 2, "v_min": lambda p: (p + 4) // 3}[name]
    for p, m in itertools.product(range(1, 13), (1, 2, 5, 12, 40)):
        assert max(peaks(generate(name, p, m))) <= 2 * min(promised(p), m)


@pytest.mark.parametrize("name", FAMILIES)
def test_64_ranks_and_512_microbatches_in_5_seconds(name):
    def seconds():
        start = time.process_time()
        schedule = generate(name, 64, 512)
        check(schedule)
        simulate(schedule, even(schedule, 1, 1, 1))
        return time.process_time() - start

    assert any(seconds() < 5 for _ in range(2))  # a neighbour may have had half of the core in the first
