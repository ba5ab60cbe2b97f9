"""Degrees against the world, and what dp.degree -1 becomes."""

from dataclasses import dataclass, field

import pytest

from research import settings
from research.config import DpConfig, RunConfig, degrees, with_world


@dataclass(frozen=True)
class Section:
    degree: int = 1
    tensor: int = 1


@dataclass(frozen=True)
class Wide(RunConfig):
    """A run with three more axes."""

    tp: Section = field(default_factory=Section)
    pp: Section = field(default_factory=Section)
    ep: Section = field(default_factory=Section)


def wide(dp: int, tp: int, pp: int) -> Wide:
    return Wide(dp=DpConfig(dp), tp=Section(tp), pp=Section(pp), ep=Section(4, 2))


@pytest.mark.parametrize(("dp", "tp", "pp", "world", "becomes"), [
    (-1, 1, 1, None, 1), (-1, 2, 3, None, 1), (4, 2, 3, None, 4),
    (-1, 1, 1, 6, 6), (-1, 2, 1, 6, 3), (-1, 2, 3, 6, 1), (2, 1, 3, 6, 2),
])  # fmt: skip
def test_degrees_that_make_the_world(dp: int, tp: int, pp: int, world: int | None, becomes: int) -> None:
    config, problems = with_world(wide(dp, tp, pp), world)
    assert problems == [] and config.dp.degree == becomes
    assert degrees(config) == {"pp": pp, "dp": becomes, "cp": 1, "tp": tp, "ep": 4, "etp": 2}


@pytest.mark.parametrize(("dp", "tp", "pp", "world", "told"), [
    (-1, 2, 2, 6, "degrees=4 (pp*cp*tp) must divide the world of 6 ranks; legal: 1, 2, 3, 6"),
    (2, 1, 1, 6, "dp.degree=2 times pp*cp*tp=1 must equal the world of 6 ranks; legal: 6, or -1"),
    (2, 2, 1, 6, "dp.degree=2 times pp*cp*tp=2 must equal the world of 6 ranks; legal: 3, or -1"),
    (2, 2, 2, 6, "dp.degree=2 times pp*cp*tp=4 must equal the world of 6 ranks; legal: -1, with other degrees"),
    (1, 1, 1, 2, "dp.degree=1 times pp*cp*tp=1 must equal the world of 2 ranks; legal: 2, or -1"),
])  # fmt: skip
def test_degrees_that_do_not(dp: int, tp: int, pp: int, world: int, told: str) -> None:
    _, problems = with_world(wide(dp, tp, pp), world)
    assert [str(p) for p in problems] == [told]


def test_the_world_is_told_with_everything_else(refused) -> None:
    world, key = refused("dp.degree=2", "model.dmi=3", world=3)[::-1]
    assert world.startswith("dp.degree=2 times") and key.startswith("model.dmi=3")


def test_axes_look_at_the_degree_that_the_world_leaves(refused) -> None:
    assert settings.load(None, ["train.global_batch=4"], world=4).dp.degree == 4
    (line,) = refused("train.global_batch=2", world=4)
    assert line.startswith("dp.degree=4 leaves ranks without a sample")
