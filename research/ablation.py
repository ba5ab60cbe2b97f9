"""An ablation file: a question, a prediction, and arms that each change some keys of one base config."""

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from research import settings
from research.config import Check, RunConfig, Scalar, replace
from research.files import write_atomically
from research.problems import ConfigError, Problem, text_of

NEEDED = ("question", "prediction", "base", "seeds")
KEYS = (*NEEDED, "repeats", "baseline", "arms", "product", "exclude", "impossible")
JOINT = "+"  # between the levels that name an arm of a product
CHANGES = "a mapping of arm to words", "NAME: [key=value, ...]"
FACTORS = "a mapping of factors", "key: [value, ...] or NAME: {LEVEL: [key=value, ...]}"
Levels = dict[str, tuple[str, ...]]  # name of a level (or of an arm) -> `key=value` words


@dataclass(frozen=True)
class Ablation:
    """`arms`: name -> `key=value` words that it adds to the base config; those of the product stand last."""

    name: str
    question: str
    prediction: str
    base: Path
    seeds: tuple[int, ...]
    arms: Levels
    repeats: int = 1  # of each seed, which tell how much a measurement scatters
    baseline: str = ""  # the arm that ratios are over
    impossible: tuple[str, ...] = ()  # arms that are expected to be refused


@dataclass(frozen=True)
class Plan:
    """What an ablation comes to: the runs of its possible arms, and why the others, as expected, are none."""

    ablation: Ablation
    runs: list[RunConfig] = field(default_factory=list)
    impossible: dict[str, str] = field(default_factory=dict)  # arm -> the rules that it breaks


def remember(whole: Plan, folder: str | Path) -> None:
    """Keep what an ablation wants beside its rows, for the tables that are made of them later."""
    told = dataclasses.asdict(whole.ablation) | {"base": str(whole.ablation.base)}
    content = json.dumps({"ablation": told, "impossible": whole.impossible}, indent=1)
    write_atomically(_memory(folder, whole.ablation.name), content.encode())


def remembered(folder: str | Path, name: str) -> tuple[Ablation, dict[str, str]] | None:
    """What was kept, and why which arms are impossible; None where nothing was. Raises ValueError naming a file that is
    damaged."""
    path = _memory(folder, name)
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in tree["ablation"].items()}
        fields |= {"base": Path(fields["base"]), "arms": {arm: tuple(words) for arm, words in fields["arms"].items()}}
        return Ablation(**fields), tree["impossible"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no record of an ablation: {error}") from error


def _memory(folder: str | Path, name: str) -> Path:
    return Path(folder) / "ablations" / f"{name}.json"


def read(path: str | Path) -> Ablation:
    """Raises ConfigError naming the file and every entry that is missing, unknown or of the wrong form."""
    path = Path(path)
    tree, problems = settings.read_yaml(path)
    if problems:
        raise ConfigError(problems)
    problems += [Problem(k, None, "is not known here", ", ".join(KEYS)) for k in tree if k not in KEYS]
    problems += [Problem(k, None, "is missing") for k in NEEDED if k not in tree]
    if not {"arms", "product"} & set(tree):
        problems.append(Problem("arms", None, "is missing", "arms, product, or both"))
    for name in ("question", "prediction", "base", "baseline"):
        if not isinstance(tree.get(name, ""), str):
            problems.append(Problem(name, tree[name], "is not text"))
    arms = _levels("arms", tree["arms"], *CHANGES, problems) if "arms" in tree else {}
    product = _product(tree, problems)
    problems += [Problem(f"product: {n}", None, "is the name of an arm as well") for n in product if n in arms]
    arms |= product
    impossible = _impossible(tree.get("impossible", []), arms, problems)
    possible = [arm for arm in arms if arm not in impossible]
    if "baseline" in tree and arms and tree["baseline"] not in possible:
        rule = "is marked as impossible" if tree["baseline"] in impossible else "is no arm"
        problems.append(Problem("baseline", tree["baseline"], rule, ", ".join(possible)))
    seeds, repeats = tree.get("seeds", [0]), tree.get("repeats", 1)
    problems += _seed_problems(seeds, repeats)
    if problems:
        raise ConfigError([Problem(f"{path}: {p.key}", p.value, p.rule, p.legal) for p in problems])
    base, baseline = path.parent / str(tree["base"]), str(tree.get("baseline", next(iter(possible or arms))))
    told = str(tree["question"]), str(tree["prediction"])
    return Ablation(path.stem, *told, base, tuple(seeds), arms, repeats, baseline, impossible)


def _seed_problems(seeds: Any, repeats: Any) -> Iterator[Problem]:
    if not isinstance(seeds, list) or not seeds or not all(type(s) is int and s >= 0 for s in seeds):
        yield Problem("seeds", seeds, "is not a list of seeds", "[0], [0, 1, 2]")
    elif len(set(seeds)) < len(seeds):
        yield Problem("seeds", seeds, "names a seed twice", "[0], [0, 1, 2]")
    if type(repeats) is not int or repeats < 1:
        yield Problem("repeats", repeats, "is not a number of repetitions", "an integer, at least 1")


def _levels(name: str, tree: Any, form: str, legal: str, problems: list[Problem]) -> Levels:
    """A mapping of names to lists of words; what is not one is added to `problems`."""
    if not isinstance(tree, dict) or not tree:
        problems.append(Problem(name, tree, f"is not {form}", legal))
        return {}
    for level, words in tree.items():
        if type(level) not in (str, int):  # on, off, yes, 1e3: other names would stand in tables
            rule = "is what YAML reads where the name is not in quotes"
            problems.append(Problem(f"{name}: {text_of(level)}", None, rule, "the name in quotes"))
        if not isinstance(words, list) or not all(isinstance(w, str) for w in words):
            problems.append(Problem(f"{name}.{level}", words, "is not a list of words", "[key=value, ...]"))
    return {str(level): tuple(words) if isinstance(words, list) else () for level, words in tree.items()}


def _product(tree: Mapping[str, Any], problems: list[Problem]) -> Levels:
    """Every combination of one level of each factor, but for those that an entry of `exclude` fits."""
    given = tree.get("product", {})
    if not isinstance(given, dict) or ("product" in tree and not given):
        problems.append(Problem("product", given, f"is not {FACTORS[0]}", FACTORS[1]))
        return {}
    factors = {str(name): _factor(str(name), levels, problems) for name, levels in given.items()}
    unused, kept = _exclusions(tree.get("exclude", []), factors, problems), {}
    fits = [(e, {f: _chosen(levels) for f, levels in e.items()}) for e in unused]
    for names in itertools.product(*factors.values()):
        levels = dict(zip(factors, names, strict=True))
        out = [e for e, wanted in fits if all(any(_is(levels[f], f, v) for v in vs) for f, vs in wanted.items())]
        unused = [e for e in unused if e not in out]
        if levels and not out:
            kept[JOINT.join(names)] = tuple(w for factor, level in levels.items() for w in factors[factor][level])
    problems += [Problem("exclude", e, "excludes nothing") for e in unused]
    if factors and not kept and all(factors.values()):
        problems.append(Problem("exclude", tree["exclude"], "leaves no arm of the product"))
    return kept


def _factor(name: str, levels: Any, problems: list[Problem]) -> Levels:
    """Levels of a factor that is a key with values, or a name with levels of several words each."""
    if isinstance(levels, list) and levels:
        words = [settings.word(name, value) for value in levels]
        twice = [word.partition("=")[2] for word, count in Counter(words).items() if count > 1]
        problems += [Problem(f"product.{name}", value, "is a level twice") for value in twice]
        return {word: (word,) for word in words}
    return _levels(f"product.{name}", levels, "values of a key, or levels with their words", FACTORS[1], problems)


def _exclusions(given: Any, factors: Mapping[str, Levels], problems: list[Problem]) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not all(isinstance(e, dict) and e for e in given):
        problems.append(Problem("exclude", given, "is not a list of combinations", "[{FACTOR: LEVEL, ...}, ...]"))
        return []
    good = []
    for entry in given:
        if unknown := [str(f) for f in entry if f not in factors]:
            problems.append(Problem(f"exclude.{unknown[0]}", None, "is no factor", ", ".join(factors)))
        else:
            good.append(entry)
    return good


def _chosen(levels: Any) -> list[Any]:
    return levels if isinstance(levels, list) else [levels]


def _is(level: str, factor: str, value: Any) -> bool:
    """Whether an exclusion means this level: by its name, or by the value of the key that the factor is."""
    return level in (str(value), settings.word(factor, value))


def _impossible(patterns: Any, arms: Levels, problems: list[Problem]) -> tuple[str, ...]:
    """The arms that the patterns (`tp3*`) name."""
    if not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
        problems.append(Problem("impossible", patterns, "is not a list of arms", "[NAME, ...], * for any letters"))
        return ()
    for pattern in patterns:
        if arms and not matching(arms, [pattern]):
            problems.append(Problem("impossible", pattern, "is no arm", ", ".join(arms)))
    return tuple(matching(arms, patterns))


def matching(arms: Mapping[str, object], patterns: Sequence[str]) -> list[str]:
    """Arms that one of the patterns names, `*` for any letters."""
    return [arm for arm in arms if any(arm == p or fnmatchcase(arm, p) for p in patterns)]


def plan(ablation: Ablation, words: Sequence[str] = (), checks: Sequence[Check] = ()) -> Plan:
    """The config of every arm, seed and repetition, `words` added to each. Raises ConfigError with the problems of all
    arms that were not expected to be impossible, and with every arm that was and is not."""
    impossible = why_impossible(ablation, words, checks)
    made = Plan(ablation, impossible={arm: why for arm, why in impossible.items() if why})
    rule = "is marked as impossible, but nothing is wrong with it"
    problems = [Problem(f"arm {arm}", None, rule) for arm, why in impossible.items() if not why]
    for arm in ablation.arms:
        if arm not in impossible:
            found, wrong = _runs_of(ablation, arm, words, checks)
            made.runs.extend(found)
            problems += [Problem(f"arm {arm}: {p.key}", p.value, p.rule, p.legal) for p in wrong]
    problems += _of_a_shared_folder(made.runs)
    if problems:
        raise ConfigError(list({str(p): p for p in problems}.values()))
    return made


def _of_a_shared_folder(runs: Sequence[RunConfig]) -> Iterator[Problem]:
    """Runs that would go on from each other's checkpoints, and remove them."""
    used = Counter(c.checkpoint.folder for c in runs if c.checkpoint.every)
    for folder, count in used.items():
        if folder and count > 1:
            rule = f"would hold the checkpoints of {count} runs"
            yield Problem("checkpoint.folder", folder, rule, "empty: each run then has one of its own in record.folder")


def why_impossible(ablation: Ablation, words: Sequence[str], checks: Sequence[Check]) -> dict[str, str]:
    """Arm that is expected to be impossible -> the rules that it breaks; "" where it breaks none."""
    wrong = {arm: _runs_of(ablation, arm, words, checks)[1] for arm in ablation.impossible}
    told = {arm: dict.fromkeys(str(dataclasses.replace(p, legal="")) for p in ps) for arm, ps in wrong.items()}
    return {arm: "; ".join(rules) for arm, rules in told.items()}


def _runs_of(
    ablation: Ablation, arm: str, words: Sequence[str], checks: Sequence[Check]
) -> tuple[list[RunConfig], list[Problem]]:
    found: list[RunConfig] = []
    problems: list[Problem] = []
    theirs = [*ablation.arms[arm], *words]
    keys = Counter(word.partition("=")[0] for word in ablation.arms[arm])
    problems += [Problem(key, None, "is set more than once") for key, count in keys.items() if count > 1]
    if "record.folder" in keys:
        problems.append(Problem("record.folder", None, "is one for all arms", "a word after the name of the file"))
    for seed, repeat in itertools.product(ablation.seeds, range(ablation.repeats)):
        labels: dict[str, Scalar] = {"record.ablation": ablation.name, "record.arm": arm}
        labels |= {"record.repeat": repeat, "train.seed": seed}
        problems += [Problem(w, None, "is for the ablation to set") for w in theirs if w.partition("=")[0] in labels]
        try:
            ours = [settings.word(key, value) for key, value in labels.items()]
            found.append(_resuming(settings.load(ablation.base, [*theirs, *ours], checks)))
        except ConfigError as error:
            problems += error.problems
    return found, problems


def _resuming(config: RunConfig) -> RunConfig:
    """An arm that keeps checkpoints goes on from them when it is started again."""
    c = config.checkpoint
    return replace(config, {"checkpoint.resume": "auto"}) if c.every and not c.resume else config
