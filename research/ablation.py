"""An ablation file: a question, a prediction, and arms that each change some keys of one base config."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from research import settings
from research.config import Check, ConfigError, Problem, RunConfig, Scalar
from research.record import row_path, run_id

KEYS = ("question", "prediction", "base", "seeds", "arms")


@dataclass(frozen=True)
class Ablation:
    """`arms`: name -> `key=value` words that it adds to the base config."""

    name: str
    question: str
    prediction: str
    base: Path
    seeds: tuple[int, ...]
    arms: dict[str, tuple[str, ...]]


def read(path: str | Path) -> Ablation:
    """Raises ConfigError naming the file and every entry that is missing, unknown or of the wrong form."""
    path = Path(path)
    tree, problems = settings.read_yaml(path)
    if problems:
        raise ConfigError(problems)
    problems += [Problem(f"{path}: {k}", None, "is not known here", ", ".join(KEYS)) for k in tree if k not in KEYS]
    problems += [Problem(f"{path}: {k}", None, "is missing") for k in KEYS if k not in tree]
    for name in ("question", "prediction", "base"):
        if not isinstance(tree.get(name, ""), str):
            problems.append(Problem(f"{path}: {name}", tree[name], "is not text"))
    arms, seeds = tree.get("arms", {"": []}), tree.get("seeds", [0])
    if not isinstance(arms, dict) or not arms:
        problems.append(Problem(f"{path}: arms", arms, "is not a mapping of arm to words", "NAME: [key=value, ...]"))
        arms = {}
    for name, words in arms.items():
        if not isinstance(words, list) or not all(isinstance(w, str) for w in words):
            problems.append(Problem(f"{path}: arms.{name}", words, "is not a list of words", "[key=value, ...]"))
    if not isinstance(seeds, list) or not seeds or not all(type(s) is int and s >= 0 for s in seeds):
        problems.append(Problem(f"{path}: seeds", seeds, "is not a list of seeds", "[0], [0, 1, 2]"))
    elif len(set(seeds)) < len(seeds):
        problems.append(Problem(f"{path}: seeds", seeds, "names a seed twice", "[0], [0, 1, 2]"))
    if problems:
        raise ConfigError(problems)
    named = {str(name): tuple(words) for name, words in arms.items()}
    base = path.parent / str(tree["base"])
    return Ablation(path.stem, str(tree["question"]), str(tree["prediction"]), base, tuple(seeds), named)


def runs(ablation: Ablation, words: Sequence[str] = (), checks: Sequence[Check] = ()) -> list[RunConfig]:
    """The config of every arm and seed, `words` added to each. Raises ConfigError with the problems of all arms."""
    found: list[RunConfig] = []
    problems: list[Problem] = []
    for arm, changes in ablation.arms.items():
        for seed in ablation.seeds:
            labels: dict[str, Scalar] = {"record.ablation": ablation.name, "record.arm": arm, "train.seed": seed}
            theirs = [*changes, *words]
            wrong = [Problem(w, None, "is for the ablation to set") for w in theirs if w.partition("=")[0] in labels]
            try:
                ours = [settings.word(key, value) for key, value in labels.items()]
                found.append(settings.load(ablation.base, [*theirs, *ours], checks))
            except ConfigError as error:
                wrong += error.problems
            problems += [Problem(f"arm {arm}: {p.key}", p.value, p.rule, p.legal) for p in wrong]
    if problems:
        raise ConfigError(list({str(p): p for p in problems}.values()))
    return found


def missing(configs: Sequence[RunConfig]) -> Iterator[RunConfig]:
    """Those that have no row yet."""
    return (c for c in configs if not row_path(c.record.folder, run_id(c)).exists())
