"""Pictures show what was simulated, and the README shows what the code makes."""

import re
from pathlib import Path

import pytest

import research.parallel.pp
from research.parallel.pp.check import peaks
from research.parallel.pp.draw import picture, sketch, unit_of
from research.parallel.pp.generate import FAMILIES, generate
from research.parallel.pp.simulate import even, simulate
from research.train.action import parts

README = (Path(research.parallel.pp.__file__).parent / "README.md").read_text(encoding="utf-8")


def line(name, ranks=4, microbatches=8, times=(1, 1, 1), per_rank=None, **more):
    schedule = generate(name, ranks, microbatches, per_rank)
    return simulate(schedule, even(schedule, *times, **more))


def test_sketch_of_1f1b():
    """Narayanan et al. 2021, figure 4 top, with 2 ranks and 3 microbatches, backward twice as long."""
    assert sketch(line("1f1b", 2, 3)).splitlines() == [
        "rank 0  FF..RRFRR.RR",
        "        01  00211 22",
        "rank 1  .FRRFRRFRR..",
        "         000111222",
    ]


def test_wide_sketches_are_cut_and_say_so():
    text = sketch(line("gpipe", 2, 20), width=30)
    assert max(map(len, text.splitlines())) <= 8 + 30 and "the first 30 of 63 columns" in text


def test_a_column_divides_all_times():
    assert unit_of(line("zbv")) == 0.5
    assert unit_of(line("1f1b", times=(2, 2, 1))) == 1  # 2 and 3: half of the shortest
    assert unit_of(line("gpipe", times=(1, 1, 1)), line("zbv")) == 0.5


@pytest.mark.parametrize("name", FAMILIES)
def test_readme_shows_what_is_generated(name):
    assert f"`{name}`\n\n```\n{sketch(line(name))}\n```\n" in README


@pytest.mark.parametrize("p", [4, 6])
@pytest.mark.parametrize("name", FAMILIES)
def test_formulas_of_the_readme(name, p):
    """Every row of its table, as simulated."""
    row = next(r for r in README.splitlines() if r.startswith(f"| `{name}` "))
    _, _, held, bubble, peak, weights, *_ = (cell.strip() for cell in row.split("|"))
    v, m, f, b, w, pair = 3, 4 * p, 4.0, 4.0, 3.0, 0.9 * 11.0
    if name in ("zbv", "v_half", "v_min"):
        f = b = w = 1.0
    found = line(name, p, m, (f, b, w), v if held == "v" else None, overlap=0.9)
    waits = [found.span(r) - found.busy(r) for r in range(p)]
    if name.startswith("dualpipe"):
        waits = [found.step - found.busy(r) for r in range(p)]
    known = {
        "(p-1)(F+B+W)": (p - 1) * (f + b + w),
        "(p-1)(F+B+W)/v": (p - 1) * (f + b + w) / v,
        "(p-1)(F+B-W)": (p - 1) * (f + b - w),
        "(p-1)(F+B-W)/v": (p - 1) * (f + b - w) / v,
        "(p-1)(F+B-2W)": (p - 1) * (f + b - 2 * w),
        "0 where F=B=W": 0,
        "(p/2-1)(pair+B-2W)": (p / 2 - 1) * (pair + b - 2 * w),
        "(p-1)(pair+B-2W)/2": (p - 1) * (pair + b - 2 * w) / 2,
    }
    if bubble in known:
        assert max(waits) == pytest.approx(known[bubble])
    else:
        share = {"about half of 1F1B's": 1 / 2, "about two thirds of 1F1B's": 2 / 3}[bubble]
        assert share - 1 / p <= max(waits) / (3 * (p - 1)) <= share
    schedule = found.schedule
    most = max(peaks(schedule)) * p / schedule.stages
    formulas = {"m": m, "p": p, "2p-1": 2 * p - 1, "p + (p-1)/v": p + (p - 1) / v, "p+1": p + 1, "p + 1/2": p + 0.5}
    formulas |= {"(p+2)//2": (p + 2) // 2, "(p+4)//3": (p + 4) // 3}
    assert most == pytest.approx(formulas[peak])
    assert sum(map(len, schedule.holds)) == int(weights) * schedule.stages


def test_svg_has_a_box_with_its_number_for_every_action():
    timeline = line("dualpipe")
    text = picture([timeline], "svg").decode()
    actions = [a for entries in timeline.schedule.actions for e in entries for a in parts(e)]
    numbers = re.findall(r">(\d+)</text>", text)
    for m in range(4, 8):  # lower ones are ticks of the axis as well
        assert numbers.count(str(m)) >= sum(a.microbatch == m for a in actions)
    assert text == picture([timeline], "svg").decode()  # the same picture each time


def test_png_of_two_schedules():
    one, two = picture([line("zbv")], "png"), picture([line("zbv"), line("1f1b")], "png")
    assert one.startswith(b"\x89PNG") and two.startswith(b"\x89PNG") and len(two) > len(one)
