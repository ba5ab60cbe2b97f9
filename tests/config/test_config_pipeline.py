"""Pipeline parallelism refuses what has no schedule or leaves a stage empty, by key, value, rule and legal values."""

import dataclasses

import pytest

from experiments.command import CHECKS
from research import settings
from research.config import PpConfig
from research.parallel import pp
from research.parallel.pp.csv_file import to_csv
from research.parallel.pp.generate import FAMILIES, FILE, generate
from research.problems import ConfigError

TINY = "experiments/configs/tiny.yaml"


@pytest.mark.parametrize(
    "words, told",
    [
        ("pp.degree=0", r"pp.degree=0 is out of range"),
        ("pp.degree=2 pp.schedule=zbw", r"pp.schedule=zbw is unknown; legal: gpipe, 1f1b, .*, file:PATH"),
        ("pp.degree=3 pp.schedule=dualpipe", r"pp.degree=3 must be a multiple of 2 for schedule=dualpipe; legal: 2, 4"),
        ("pp.degree=2 pp.stages_per_rank=2", r"pp.stages_per_rank=2 does not fit schedule=1f1b; legal: 1"),
        ("pp.degree=2 pp.stages_per_rank=-1", r"pp.stages_per_rank=-1 is out of range"),
        ("pp.degree=7", r"pp.degree=7 makes 7 stages, of which some would be empty: model.layers=4, .*; legal: 1 to 6"),
        ("pp.degree=4 pp.schedule=zbv", r"pp.degree=4 makes 8 stages"),
        ("pp.schedule=zbvv", r"pp.schedule=zbvv is unknown; legal: gpipe, "),
        ("pp.stages_per_rank=7", r"pp.stages_per_rank=7 does not fit schedule=1f1b; legal: 1"),
        (
            "pp.cut=evenly",
            r"pp.cut=evenly is no cut of the layers; legal: even, cost, or how many layers each stage has",
        ),
        (
            "pp.degree=2 pp.cut=2,1",
            r"pp.cut=2,1 does not fit: layers of stages=\[2, 1\] must add up to layers=4.*; legal:",
        ),
        ("pp.degree=2 pp.cut=1,1,2", r"pp.cut=1,1,2 does not fit: there are 2 stages, not 3; legal: even, cost, or"),
        ("pp.degree=3 pp.cut=2,0,2", r"pp.cut=2,0,2 does not fit: .* leave nothing to stages \[1\]"),
        ("pp.degree=2 pp.schedule=file:nowhere.csv", r"pp.schedule=file:nowhere.csv cannot be run: .* cannot be read"),
    ],
)
def test_refused(words, told):
    with pytest.raises(ConfigError, match=told):
        settings.load(TINY, words.split(), CHECKS)


@pytest.mark.parametrize(
    ("words", "stages"),
    [
        ("pp.degree=2000 pp.schedule=zbv", 4000),
        ("pp.degree=3000 pp.schedule=dualpipe_v", 6000),
        ("pp.degree=3000 pp.schedule=dualpipe", 3000),
        ("pp.degree=4 pp.schedule=interleaved pp.stages_per_rank=100000", 400000),
    ],
)
def test_too_many_stages_are_refused_before_a_schedule_is_made(words, stages, monkeypatch):
    monkeypatch.setattr(pp, "generate", lambda *numbers: pytest.fail("a schedule was made"))
    with pytest.raises(ConfigError, match=rf"makes {stages} stages, .*; legal: 1 to 6 stages"):
        settings.load(TINY, words.split(), CHECKS)


ACCEPTED = ["pp.degree=6", "pp.degree=2 pp.schedule=interleaved pp.stages_per_rank=3"]
# Keys that wait: pp.degree alone switches the axis off and on.
ACCEPTED += [
    "pp.schedule=dualpipe",
    "pp.schedule=interleaved pp.stages_per_rank=3",
    "pp.schedule=file:nowhere.csv",
    "pp.cut=1,2,3",
]
ACCEPTED += ["pp.degree=6 pp.cut=cost", "pp.degree=2 pp.schedule=zbv pp.cut=0,2,2,0"]


@pytest.mark.parametrize("words", ACCEPTED)
def test_accepted(words):
    settings.load(TINY, words.split(), CHECKS)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text, None),
        (lambda text: text.replace("0F0,", "0F1,", 1), "F of stage 0, microbatch 0 runs 0 times"),
        (lambda text: "\n".join(text.splitlines()[:1]), "ranks=2; legal: 1"),
        (lambda text: to_csv(generate("gpipe", 1, 2)) + "\n", "cannot be run: rank 1 runs nothing"),
    ],
)
def test_a_schedule_of_a_file_is_checked(tmp_path, change, told):
    path = tmp_path / "mine.csv"
    path.write_text(change(to_csv(generate("1f1b", 2, 2))))
    words = ["pp.degree=2", f"pp.schedule=file:{path}"]
    if told is None:
        settings.load(TINY, words, CHECKS)
        return
    with pytest.raises(ConfigError, match=told):
        settings.load(TINY, words, CHECKS)


def test_help_names_every_schedule():
    meanings = {f.name: f.metadata["meaning"] for f in dataclasses.fields(PpConfig)}
    assert f": {', '.join(FAMILIES)}, or {FILE}PATH" in meanings["schedule"]
