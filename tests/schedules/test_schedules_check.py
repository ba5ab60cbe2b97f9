"""The checker catches what it should: planted faults, each told by name. Peaks and sends against plain counting."""

import dataclasses
import itertools

import pytest

from research.parallel.pp.check import ScheduleError, check, crossed, messages, needs, peaks
from research.parallel.pp.generate import FAMILIES, generate
from research.parallel.pp.schedule import Schedule, as_run
from research.parallel.pp.simulate import even, simulate
from research.train.action import Action, Overlap, parts


def changed(schedule, rank, change):
    """The schedule with one rank's list changed in place by a function."""
    lists = [list(entries) for entries in schedule.actions]
    change(lists[rank])
    return dataclasses.replace(schedule, actions=tuple(map(tuple, lists)))


def swap(i, j):
    def change(entries):
        entries[i], entries[j] = entries[j], entries[i]

    return change


def without(action):
    return lambda entries: entries.remove(action)


ZB = generate("zb_h1", 4, 8)
PLANTS = {
    "two swapped": (changed(generate("1f1b", 2, 4), 0, swap(0, 2)), "deadlock"),
    "a backward before its forward": (changed(generate("gpipe", 2, 2), 1, swap(1, 3)), "deadlock"),
    "W before B": (changed(ZB, 0, swap(4, 5)), "rank 0 stands before W of stage 0, microbatch 0 and waits for B"),
    "W missing": (changed(ZB, 2, without(Action("W", 2, 5))), "stage 2, microbatch 5 runs BW 0, B 1, W 0 times"),
    "B missing": (changed(ZB, 1, without(Action("B", 1, 0))), "stage 1, microbatch 0 runs BW 0, B 0, W 1 times"),
    "F missing": (changed(ZB, 3, without(Action("F", 3, 7))), "F of stage 3, microbatch 7 runs 0 times"),
    "F twice": (changed(ZB, 0, lambda e: e.append(Action("F", 0, 3))), "F of stage 0, microbatch 3 runs 2 times"),
    "BW and W": (
        changed(generate("1f1b", 2, 2), 0, lambda e: e.append(Action("W", 0, 1))),
        "backward of stage 0, microbatch 1 runs BW 1, B 0, W 1 times: legal",
    ),
    "too many": (changed(ZB, 0, lambda e: e.append(Action("F", 0, 8))), "F of stage 0, microbatch 8 is none of"),
    "not held": (dataclasses.replace(ZB, holds=((0,), (1,), (2,), (0,))), "rank 3 runs stage 3 but holds 0"),
    "held by none": (dataclasses.replace(ZB, stages=5), "F of stage 4, microbatch 0 runs 0 times"),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_fault_is_caught(plant):
    schedule, told = PLANTS[plant]
    with pytest.raises(ScheduleError, match=told):
        check(schedule)


def test_ranks_that_wait_for_each_other_are_all_named():
    """Rank 1 wants microbatch 1 first, rank 0 sends it only after rank 1's gradient of microbatch 0."""
    lists = (
        (Action("F", 0, 0), Action("BW", 0, 0), Action("F", 0, 1), Action("BW", 0, 1)),
        (Action("F", 1, 1), Action("F", 1, 0), Action("BW", 1, 0), Action("BW", 1, 1)),
    )
    schedule = Schedule("mine", 2, 2, ((0,), (1,)), lists)
    told = "mine deadlocks: rank 0 stands before BW of stage 0, microbatch 0 .*; rank 1 stands before F of stage 1"
    with pytest.raises(ScheduleError, match=told):
        check(schedule)
    with pytest.raises(ScheduleError, match="deadlocks"):
        simulate(schedule, even(schedule, 1, 1, 1))


def test_a_pair_that_needs_itself_deadlocks():
    lists = ((Overlap(Action("F", 0, 0), Action("BW", 0, 0)),),)
    with pytest.raises(ScheduleError, match="before F of stage 0, microbatch 0 with BW of stage 0"):
        check(Schedule("mine", 1, 1, ((0,),), lists))


def test_a_microbatch_split_over_the_copies_of_a_stage_is_caught():
    """DualPipe: forward on one copy, backward on the other."""
    dual = generate("dualpipe", 2, 4)
    (backward,) = (a for a in dual.flat(0) if a.kind in ("B", "BW") and a[1:] == (0, 1))
    moved = changed(changed(dual, 0, without(backward)), 1, lambda e: e.append(backward))
    with pytest.raises(ScheduleError, match="stage 0 runs microbatch 1 on ranks 0 and 1"):
        check(moved)


def test_every_swap_of_neighbours_is_caught_or_harmless():
    """What the checker lets pass runs to its end in the simulator, with every need before its use."""
    caught = 0
    for rank, i in itertools.product(range(2), range(17)):
        schedule = changed(generate("zbv", 2, 3), rank, swap(i, i + 1))
        try:
            check(schedule)
        except ScheduleError:
            caught += 1
            continue
        line = simulate(schedule, even(schedule, 1, 1, 1))
        ends = {}
        for r in range(2):
            for entry, end in zip(schedule.actions[r], line.ends[r], strict=True):
                ends.update({a: end for a in parts(entry)})
        for r in range(2):
            for entry, start in zip(schedule.actions[r], line.starts[r], strict=True):
                assert all(ends[n] <= start for a in parts(entry) for n in needs(a, 4))
    assert 8 < caught < 30


def held_by_hand(schedule, rank):
    """Most open intervals from F to W or BW, by replay."""
    open_, most = set(), 0
    for kind, *key in schedule.flat(rank):
        if kind == "F":
            open_.add(tuple(key))
            most = max(most, len(open_))
        elif kind in ("W", "BW"):
            open_.remove(tuple(key))
    return most


@pytest.mark.parametrize("name", FAMILIES)
def test_live_activations_are_counted(name):
    schedule = generate(name, 4, 11)
    assert check(schedule).live == tuple(held_by_hand(schedule, r) for r in range(4))


def test_1f1b_holds_p_then_p_minus_1():
    assert check(generate("1f1b", 6, 20)).live == (6, 5, 4, 3, 2, 1)
    assert check(generate("1f1b", 6, 3)).live == (3, 3, 3, 3, 2, 1)


def test_uneven_stages_weigh_what_they_hold():
    schedule = generate("zb_h1", 3, 6)
    assert peaks(schedule, kept=[10, 20, 40], late=[1, 2, 4]) == (30, 2 * 20 + 2, 40 + 2 * 4)
    assert peaks(schedule, kept=[1, 1, 1], late=[3, 3, 3])[2] == 9.0  # W may hold more than F left


@pytest.mark.parametrize("name", FAMILIES)
def test_every_message_is_sent_once_and_needed_once(name):
    schedule = generate(name, 4, 9)
    sent = [m for way in messages(schedule).values() for m in way]
    turns = 1 if name in ("zbv", "v_half", "v_min", "dualpipe_v") else 0  # boundaries inside the last rank of a V
    assert len(sent) == len(set(sent)) == 2 * 9 * (schedule.stages - 1 - turns)
    for (sender, receiver), way in messages(schedule).items():
        assert sender != receiver
        assert all(m.kind in ("F", "B") for m in way)


def test_crossed_messages_are_counted():
    """Rank 1 uses microbatch 1 first, though 0 was sent before it: right, if receives keep the sender's order."""
    lists = (
        (Action("F", 0, 0), Action("F", 0, 1), Action("BW", 0, 1), Action("BW", 0, 0)),
        (Action("F", 1, 1), Action("F", 1, 0), Action("BW", 1, 1), Action("BW", 1, 0)),
    )
    schedule = Schedule("mine", 2, 2, ((0,), (1,)), lists)
    assert check(schedule).crossed == crossed(schedule) == 1
    assert [check(generate(n, 4, 8)).crossed for n in ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2")] == [0] * 5


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("ranks, microbatches", [(2, 4), (4, 7), (8, 16)])
def test_as_run_takes_as_long_and_holds_as_much(name, ranks, microbatches):
    """B and W of the first stage are one action where they meet; all else stays."""
    listed = generate(name, ranks, microbatches)
    run, times = as_run(listed), even(listed, 1.0, 1.25, 0.75)
    assert check(run).live == check(listed).live and crossed(run) == crossed(listed)
    assert simulate(run, times).step == simulate(listed, times).step
    for rank in range(ranks):
        new = set(run.flat(rank)) - set(listed.flat(rank))
        apart = [b for a in run.flat(rank) for b in ([a._replace(kind=k) for k in "BW"] if a in new else [a])]
        assert apart == list(listed.flat(rank)) and all(a[:2] == ("BW", 0) for a in new)
        assert not any(b[:2] == ("B", 0) and w == b._replace(kind="W") for b, w in itertools.pairwise(run.flat(rank)))
