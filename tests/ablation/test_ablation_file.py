"""What an ablation file says, and all that is wrong with it or its arms, told at once."""

from pathlib import Path

import pytest

from experiments.command import CHECKS
from research.ablation import Ablation, matching, plan, read
from research.problems import ConfigError
from research.record import run_id

ROOT = Path(__file__).parents[2]


def told(error: pytest.ExceptionInfo[ConfigError]) -> list[str]:
    return [str(p) for p in error.value.problems]


def test_a_good_file(ablation) -> None:
    path = ablation(seeds=[0, 2])
    base = ROOT / "experiments" / "configs" / "tiny.yaml"
    arms = {"one": (), "two": ("train.global_batch=8",)}
    assert read(path) == Ablation("axes", "Does it work?", "It does.", base, (0, 2), arms, 1, "one")
    found = plan(read(path), ["train.steps=7"], CHECKS).runs
    labels = [(c.record.ablation, c.record.arm, c.train.seed, c.train.global_batch, c.train.steps) for c in found]
    assert labels == [("axes", arm, seed, batch, 7) for arm, batch in (("one", 16), ("two", 8)) for seed in (0, 2)]


@pytest.mark.parametrize("path", sorted((ROOT / "experiments" / "ablations").glob("*.yaml")), ids=lambda p: p.stem)
def test_the_ablations_of_the_project(path: Path) -> None:
    found = plan(read(path), (), CHECKS).runs
    assert len({run_id(c) for c in found}) == len(found) > 1


@pytest.mark.parametrize(
    ("entries", "problems"),
    [
        ({"question": None}, ["question is missing"]),
        ({"seeds": None, "arms": None}, ["seeds is missing", "arms is missing"]),
        ({"quesiton": 1, "question": None}, ["quesiton is not known here", "question is missing"]),
        ({"question": 3, "base": ["x"]}, ["question=3 is not text", "base=['x'] is not text"]),
        ({"arms": {}}, ["arms={} is not a mapping of arm to words"]),
        ({"arms": ["dp.degree=2"]}, ["arms=['dp.degree=2'] is not a mapping of arm to words"]),
        ({"arms": {"a": "dp.degree=2"}}, ["arms.a=dp.degree=2 is not a list of words"]),
        ({"arms": {"a": {"dp": 2}, "b": [3]}}, ["arms.a={'dp': 2} is not a list", "arms.b=[3] is not a list of words"]),
        ({"seeds": 3}, ["seeds=3 is not a list of seeds"]),
        ({"seeds": []}, ["seeds=[] is not a list of seeds"]),
        ({"seeds": [0, True]}, ["seeds=[0, True] is not a list of seeds"]),
        ({"seeds": [0, -1]}, ["seeds=[0, -1] is not a list of seeds"]),
        ({"seeds": [0, 1, 0]}, ["seeds=[0, 1, 0] names a seed twice"]),
        ({"seeds": ["x"], "arms": 3, "x": 1}, ["x is not known here", "arms=3 is not a mapping", "seeds=['x'] is not"]),
    ],
)
def test_every_entry_that_does_not_fit_is_told(ablation, entries: dict[str, object], problems: list[str]) -> None:
    path = ablation(**entries)
    with pytest.raises(ConfigError) as caught:
        read(path)
    lines = told(caught)
    assert len(lines) == len(problems)
    assert all(line.startswith(f"{path}: {start}") for line, start in zip(lines, problems, strict=True))


@pytest.mark.parametrize(
    ("arms", "product", "read_as"),
    [
        ("{on: [], off: []}", "{x: {a: []}}", ["arms: true", "arms: false"]),
        ("{yes: [], 1e3: [], 8: []}", "{x: {a: []}}", ["arms: true", "arms: 1000"]),
        ("{a: []}", "{x: {off: [], 16: []}}", ["product.x: false"]),
        ("{'on': [], 8: []}", "{x: {'off': []}}", []),
    ],
)
def test_a_name_that_yaml_reads_as_something_else_is_told(
    ablation, arms: str, product: str, read_as: list[str]
) -> None:
    path = ablation(arms=None)
    path.write_text(f"{path.read_text()[:-1]}, arms: {arms}, product: {product}}}")
    if not read_as:
        assert list(read(path).arms) == ["on", "8", "off"]
        return
    with pytest.raises(ConfigError) as caught:
        read(path)
    rule = "is what YAML reads where the name is not in quotes; legal: the name in quotes"
    assert told(caught) == [f"{path}: {name} {rule}" for name in read_as]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("arms: {a: [}", "cannot be read: "),
        ("- a", "cannot be read: the file holds no"),
        ("question: a\nquestion: b", "cannot be read: "),
        ("question: ${nope}", "cannot be resolved: Interpolation key 'nope' not found"),
        (None, "does not exist"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_problem(tmp_path: Path, text: str | None, problem: str) -> None:
    path = tmp_path / "axes.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read(path)
    (line,) = told(caught)
    assert line.startswith(f"{path} {problem}")


def test_the_problems_of_all_arms_are_told_together(ablation) -> None:
    arms = {"one": ["model.dmi=3"], "good": [], "two": ["+x=1", "model.kv_heads=3"], "three": ["model.dim=[1]"]}
    with pytest.raises(ConfigError) as caught:
        plan(read(ablation(arms=arms, seeds=[0, 1])), ["train.lr=abc"], CHECKS)
    assert [line.partition(";")[0] for line in told(caught)] == [
        "arm one: train.lr=abc is not a number",
        "arm one: model.dmi=3 is not a key, did you mean model.dim?",
        "arm good: train.lr=abc is not a number",
        "arm two: +x=1 is not a setting",
        "arm two: train.lr=abc is not a number",
        "arm two: model.kv_heads=3 must divide model.heads=8",
        "arm three: model.dim=[1] is not an integer",  # in the order of the base, then of the words
        "arm three: train.lr=abc is not a number",
    ]


def test_a_base_that_is_wrong_is_told_once_for_each_arm(ablation, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("model: [1]")
    with pytest.raises(ConfigError) as caught:
        plan(read(ablation(base="base.yaml", seeds=[0, 1])))
    assert [line.partition(";")[0] for line in told(caught)] == [
        f"arm {arm}: model=[1] is a section, not a key" for arm in ("one", "two")
    ]


def test_a_base_that_is_missing_is_told(ablation) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(read(ablation(base="../nowhere.yaml")))
    assert all("nowhere.yaml does not exist" in line for line in told(caught))


@pytest.mark.parametrize("word", ["record.arm=x", "record.ablation=x", "train.seed=3"])
@pytest.mark.parametrize("by", ["arm", "command line"])
def test_what_the_ablation_sets_is_not_for_others(ablation, word: str, by: str) -> None:
    path = ablation(arms={"one": [word] if by == "arm" else []})
    with pytest.raises(ConfigError) as caught:
        plan(read(path), [word] if by == "command line" else [])
    assert told(caught) == [f"arm one: {word} is for the ablation to set"]


@pytest.mark.parametrize("name", ["1", "1e-4", "off", "null", "2024-01-01", "tp=2, dp=4", "a #b"])
def test_arms_and_ablations_keep_names_that_look_like_something_else(ablation, name: str) -> None:
    (config,) = plan(read(ablation(name="123", arms={name: []}))).runs
    assert (config.record.ablation, config.record.arm) == ("123", name)


def test_repetitions_are_runs_of_their_own(ablation) -> None:
    found = plan(read(ablation(seeds=[0, 1], repeats=2, arms={"one": []}))).runs
    assert [(c.train.seed, c.record.repeat) for c in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({run_id(c) for c in found}) == 4


PRODUCT = {"dp.degree": [1, 2], "model": {"moe": [], "dense": ["model.experts=0", "train.lr=0.1"]}}


def test_a_product_is_every_combination_but_what_is_excluded(ablation) -> None:
    found = read(ablation(product=PRODUCT, exclude=[{"dp.degree": 2, "model": "dense"}], baseline="dp.degree=1+moe"))
    dense = ("dp.degree=1", "model.experts=0", "train.lr=0.1")
    assert found.arms == {
        "one": (),
        "two": ("train.global_batch=8",),
        "dp.degree=1+moe": ("dp.degree=1",),
        "dp.degree=1+dense": dense,
        "dp.degree=2+moe": ("dp.degree=2",),
    }
    assert found.baseline == "dp.degree=1+moe"
    alone = read(ablation(product=PRODUCT, arms=None, exclude=[{"dp.degree": [1, 2], "model": ["dense"]}]))
    assert list(alone.arms) == ["dp.degree=1+moe", "dp.degree=2+moe"] and alone.baseline == "dp.degree=1+moe"
    assert len(plan(alone, (), CHECKS).runs) == 2


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ({"arms": None}, "arms is missing; legal: arms, product, or both"),
        ({"product": []}, "product=[] is not a mapping of factors"),
        ({"product": {}}, "product={} is not a mapping of factors"),
        ({"product": {"dp.degree": 2}}, "product.dp.degree=2 is not values of a key, or levels with their words"),
        ({"product": {"dp.degree": []}}, "product.dp.degree=[] is not values of a key, or levels with their words"),
        ({"product": {"model": {"moe": 3}}}, "product.model.moe=3 is not a list of words"),
        ({"product": PRODUCT, "exclude": {"model": "moe"}}, "exclude={'model': 'moe'} is not a list of combinations"),
        ({"product": PRODUCT, "exclude": [{"tp": 2}]}, "exclude.tp is no factor; legal: dp.degree, model"),
        ({"product": PRODUCT, "exclude": [{"dp.degree": 4}]}, "exclude={'dp.degree': 4} excludes nothing"),
        ({"product": PRODUCT, "exclude": [{"dp.degree": [1, 2]}]}, "exclude=[{'dp.degree': [1, 2]}] leaves no arm"),
        ({"product": {"train.lr": [0.001, 1e-3]}}, "product.train.lr=0.001 is a level twice"),
        ({"product": {"x": {"one": []}}}, "product: one is the name of an arm as well"),
        ({"repeats": 0}, "repeats=0 is not a number of repetitions"),
        ({"repeats": True}, "repeats=true is not a number of repetitions"),
        ({"baseline": "three"}, "baseline=three is no arm; legal: one, two"),
        ({"baseline": "two", "impossible": ["t*"]}, "baseline=two is marked as impossible; legal: one"),
        ({"impossible": "one"}, "impossible=one is not a list of arms"),
        ({"impossible": ["tp*"]}, "impossible=tp* is no arm; legal: one, two"),
    ],
)
def test_a_product_or_a_label_that_does_not_fit_is_told(ablation, entries: dict[str, object], problem: str) -> None:
    path = ablation(**entries)
    with pytest.raises(ConfigError) as caught:
        read(path)
    (line,) = told(caught)
    assert line.startswith(f"{path}: {problem}")


def test_arms_that_are_expected_to_be_impossible_come_with_the_reason(ablation) -> None:
    arms = {"one": [], "tp3": ["tp.degree=3"], "dp0": ["dp.degree=0"]}
    found = plan(read(ablation(arms=arms, impossible=["tp*", "dp0"])), (), CHECKS)
    assert [c.record.arm for c in found.runs] == ["one"]
    assert list(found.impossible) == ["tp3", "dp0"]
    assert found.impossible["tp3"].startswith("tp.degree=3 must divide model.heads=8; ")
    assert "legal" not in found.impossible["tp3"] and "dp.degree=0" in found.impossible["dp0"]


def test_ratios_are_over_an_arm_that_runs(ablation) -> None:
    assert read(ablation(impossible=["one"])).baseline == "two"
    assert read(ablation(impossible=["*"])).baseline == "one"  # there is nothing to compare


def test_an_arm_that_should_be_impossible_and_is_not_is_told(ablation) -> None:
    arms = {"one": [], "two": ["tp.degree=2"], "three": ["tp.degree=3"]}
    with pytest.raises(ConfigError) as caught:
        plan(read(ablation(arms=arms, impossible=["two"])), (), CHECKS)
    first, *others = told(caught)
    assert first == "arm two is marked as impossible, but nothing is wrong with it"
    assert others and all(line.startswith("arm three: tp.degree=3 must divide") for line in others)


def test_an_arm_with_checkpoints_goes_on_from_them(ablation, tmp_path: Path) -> None:
    arms = {"one": [], "saves": ["checkpoint.every=2"], "elsewhere": ["checkpoint.every=2", "checkpoint.resume=latest"]}
    found = plan(read(ablation(arms=arms)))
    assert [c.checkpoint.resume for c in found.runs] == ["", "auto", "latest"]


def test_runs_with_checkpoints_share_no_folder(ablation) -> None:
    """They would go on from each other's, and remove them."""
    words = ["checkpoint.every=2", "checkpoint.folder=mine"]
    with pytest.raises(ConfigError) as caught:
        plan(read(ablation(seeds=[0, 1])), words, CHECKS)
    (line,) = told(caught)
    assert line.startswith("checkpoint.folder=mine would hold the checkpoints of 4 runs; legal: empty")
    (alone,) = plan(read(ablation(arms={"one": []})), words, CHECKS).runs
    assert alone.checkpoint.folder == "mine"


def test_a_key_that_an_arm_sets_twice_is_told(ablation) -> None:
    """One of the two would be overridden, and the arm not be what its name says."""
    levels = {"a": ["dp.degree=2"], "b": ["dp.degree=2", "dp.zero=1"]}
    product = {"zero": levels, "train.steps": [3, 4], "again": {"c": ["dp.degree=1"]}}
    with pytest.raises(ConfigError) as caught:
        plan(read(ablation(arms={"twice": ["train.lr=1", "train.lr=2"]}, product=product)), (), CHECKS)
    arms = ["twice: train.lr", *(f"{z}+train.steps={n}+c: dp.degree" for z in "ab" for n in (3, 4))]
    assert [line.partition(" is set more than once")[0] for line in told(caught)] == [f"arm {arm}" for arm in arms]


def test_the_folder_of_rows_is_one_for_all_arms(ablation) -> None:
    path = ablation(arms={"a": [], "b": ["record.folder=other"]})
    with pytest.raises(ConfigError, match=r"arm b: record\.folder is one for all arms; legal: a word after"):
        plan(read(path), (), CHECKS)
    assert {c.record.folder for c in plan(read(ablation()), ["record.folder=other"], CHECKS).runs} == {"other"}


def test_arms_are_named_by_patterns() -> None:
    arms = dict.fromkeys(["dp2", "tp2", "tp4", "a[1]"])
    assert matching(arms, ["tp*"]) == ["tp2", "tp4"] and matching(arms, ["a[1]"]) == ["a[1]"]
    assert matching(arms, ["*2", "tp2"]) == ["dp2", "tp2"] and matching(arms, ["TP2"]) == []
