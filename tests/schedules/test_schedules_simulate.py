"""Times against the longest path, counted in another way; bubbles against closed formulas."""

import random

import pytest

from research.parallel.pp.check import needs
from research.parallel.pp.generate import FAMILIES, generate
from research.parallel.pp.simulate import Times, even, simulate
from research.train.action import parts


def longest_paths(schedule, times):
    """End of every entry: relax all edges until nothing changes (Bellman and Ford)."""
    where = {a: (r, i) for r in range(schedule.ranks) for i, e in enumerate(schedule.actions[r]) for a in parts(e)}
    makers = {**where, **{a._replace(kind="B"): place for a, place in where.items() if a.kind == "BW"}}
    edges = []
    for rank, entries in enumerate(schedule.actions):
        edges += [((rank, i), (rank, i + 1), 0.0) for i in range(len(entries) - 1)]
        for i, entry in enumerate(entries):
            for action in parts(entry):
                for need in needs(action, schedule.stages):
                    far = makers[need][0] != rank
                    edges.append((makers[need], (rank, i), times.transfer[min(need[1], action[1])] if far else 0.0))
    start = {(r, i): 0.0 for r, entries in enumerate(schedule.actions) for i in range(len(entries))}
    while True:
        moved = False
        for before, after, delay in edges:
            end = start[before] + times.of(schedule.actions[before[0]][before[1]])
            if end + delay > start[after] + 1e-12:
                start[after], moved = end + delay, True
        if not moved:
            return start


@pytest.mark.parametrize("name", FAMILIES)
def test_starts_are_longest_paths_of_uneven_times(name):
    draw = random.Random(7)
    schedule = generate(name, 4, 6)
    n = schedule.stages
    times = Times(*([draw.uniform(0.5, 2) for _ in range(k)] for k in (n, n, n, n - 1)), overlap=0.8)
    line, wanted = simulate(schedule, times), longest_paths(schedule, times)
    for rank in range(4):
        assert line.starts[rank] == pytest.approx([wanted[rank, i] for i in range(len(line.starts[rank]))])
        lengths = [e - s for s, e in zip(line.starts[rank], line.ends[rank], strict=True)]
        assert lengths == pytest.approx([times.of(entry) for entry in schedule.actions[rank]])


def test_one_slow_stage_sets_the_pace():
    schedule = generate("1f1b", 4, 50)
    slow = simulate(schedule, Times([1, 1, 3, 1], [1, 1, 3, 1], [1, 1, 3, 1], [0, 0, 0]))
    assert slow.step == pytest.approx(50 * 9 + 2 * 1 + 2 * 2)  # and the way there of the first, back of the last


def test_transfers_between_stages_of_one_rank_are_free():
    schedule = generate("zbv", 1, 4)
    assert simulate(schedule, even(schedule, 1, 1, 1, comm=100)).bubble == pytest.approx(0)


def test_transfers_delay_a_lone_microbatch_on_every_boundary():
    for name, boundaries in (("1f1b", 3), ("zbv", 6), ("interleaved", 7)):
        schedule = generate(name, 4, 1)
        quick, slow = (simulate(schedule, even(schedule, 1, 1, 0, comm=c)).step for c in (0.0, 0.25))
        assert slow - quick == pytest.approx(2 * 0.25 * boundaries)


def test_bubble_counts_all_ranks_and_alone_the_longest():
    schedule = generate("zb_h2", 4, 12)
    line = simulate(schedule, even(schedule, 1, 1, 1))
    assert line.step == 36 + 3  # a parallelogram: each rank works without a break, a slot after the one before
    assert line.bubble == pytest.approx(3 / 39)
    assert line.bubble_alone == pytest.approx(0)


def test_an_overlapped_pair_takes_its_share():
    schedule = generate("dualpipe_v", 2, 8)
    whole, part = (simulate(schedule, even(schedule, 1, 1, 1, overlap=o)) for o in (1.0, 0.5))
    pairs = sum(len(parts(e)) == 2 for e in schedule.actions[0])
    assert pairs > 0
    assert whole.busy(0) - part.busy(0) == pytest.approx(0.5 * pairs * 3 * 0.5)  # a stage is half of a rank's share
