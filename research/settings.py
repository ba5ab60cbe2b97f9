"""From text to a valid config and back: `defaults <- YAML file <- key=value words`.

`load` reports the problems of all three layers together, each as a `Problem` with key, value, rule and legal values,
before anything else happens.
"""

import dataclasses
import difflib
import os
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from research.config import Check, RunConfig, Value, replace, with_world
from research.presets import PRESETS
from research.problems import ConfigError, Problem, text_of

PRESET = "model.preset"


def load(
    path: str | Path | None, words: Sequence[str] = (), checks: Sequence[Check] = (), world: int | None = None
) -> RunConfig:
    """The config of YAML file `path` changed by `key=value` words, valid and with its world filled in.

    Raises ConfigError with every problem: unreadable file, unknown keys, wrong types, values out of range, rules
    of a section, degrees that do not make `world`, and what `checks` find.
    """
    given, raw, problems = _read(path, words)
    return _validated(given, raw, problems, checks, world)


def from_mapping(
    tree: Mapping[str, Any], words: Sequence[str] = (), checks: Sequence[Check] = (), world: int | None = None
) -> RunConfig:
    """As `load`, from the config that a row stores."""
    override, raw, problems = _read(None, words)
    return _validated(dict(flat(tree)) | override, raw, problems, checks, world)


def to_mapping(config: RunConfig) -> dict[str, dict[str, Value]]:
    """Sections of keys, as JSON holds them."""
    tree = dataclasses.asdict(config)
    return {s: {k: list(v) if isinstance(v, tuple) else v for k, v in keys.items()} for s, keys in tree.items()}


def to_words(config: RunConfig) -> list[str]:
    """The `key=value` words that make this config from the defaults."""
    default = dict(flat(to_mapping(replace(RunConfig(), preset_values(config.model.preset)))))
    return [word(k, v) for k, v in flat(to_mapping(config)) if v != default[k] or (k == PRESET and v != "none")]


def preset_values(name: str) -> dict[str, Value]:
    """`section.key` -> value of a published model."""
    return {f"model.{k}": v for k, v in PRESETS[name].items()} if name != "none" else {}


def word(name: str, value: Value) -> str:
    """The `key=value` word that gives a key this value, in quotes where bare text would be read as something else."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return f"{name}={_bare_or_quoted(value) if isinstance(value, str) else text_of(value)}"
    if len(value) == 1:
        return word(name, value[0])
    inside = (_bare_or_quoted(v, "[{}]") if isinstance(v, str) else text_of(v) for v in value)
    return f"{name}=[{','.join(inside)}]"


def _bare_or_quoted(text: str, place: str = "{}") -> str:
    """The text as it may stand in a word; `place` is what stands around it there."""
    try:
        read = OmegaConf.to_container(OmegaConf.from_dotlist([f"text={place.format(text)}"]), resolve=True)
        if read == {"text": text if place == "{}" else [text]}:
            return text
    except (yaml.YAMLError, OmegaConfBaseException):
        pass
    escaped = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # no interpolation
    return yaml.safe_dump(escaped, default_style='"', width=sys.maxsize).strip()


def flat(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`section.key` -> value, of any depth. A name that holds a dot itself is put in quotes: it is no path."""
    for name, value in tree.items():
        full = f"{prefix}'{name}'" if "." in str(name) else f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from flat(value, full + ".")
        else:
            yield full, value


def help_text() -> str:
    """Every key by section, with type, default and meaning."""
    lines, default = [], to_mapping(RunConfig())
    for section in dataclasses.fields(RunConfig):
        kind = _section_types()[section.name]
        lines.append(f"{section.name}: {(kind.__doc__ or '').splitlines()[0]}")
        hints = get_type_hints(kind)
        for f in dataclasses.fields(kind):
            name = word(f"{section.name}.{f.name}", default[section.name][f.name])
            lines.append(f"  {name:<32} {f.metadata['meaning']} ({_legal(hints[f.name], f.metadata)})")
        lines.append("")
    return "\n".join(lines)


def _section_types() -> dict[str, type]:
    return get_type_hints(RunConfig)


def _known() -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """`section.key` -> (type, metadata)."""
    return {
        f"{section}.{f.name}": (get_type_hints(kind)[f.name], f.metadata)
        for section, kind in _section_types().items()
        for f in dataclasses.fields(kind)
    }


def read_yaml(path: Path) -> tuple[dict[str, Any], list[Problem]]:
    """The mapping that a YAML file holds, interpolations resolved, or what is wrong with the file."""
    layer, _, problems = _file_layer(path)
    try:
        tree = OmegaConf.to_container(layer, resolve=True)
    except OmegaConfBaseException as error:
        return {}, [Problem(str(path), None, f"cannot be resolved: {str(error).splitlines()[0]}")]
    assert isinstance(tree, dict)
    return {str(k): v for k, v in tree.items()}, problems


def _file_layer(path: Path) -> tuple[DictConfig, dict[str, Any], list[Problem]]:
    """What a YAML file gives, and the text (a list of texts) that each of its leaves was written as."""
    try:
        text = path.read_text(encoding="utf-8")
        written = yaml.load(text, yaml.BaseLoader)
        if written in (None, ""):
            written = {}
        if not isinstance(written, dict):
            raise ValueError("the file holds no `section:` mapping")
        tree = OmegaConf.create(text) if written else OmegaConf.create()
        assert isinstance(tree, DictConfig)
        return tree, dict(flat(written)), []
    except FileNotFoundError:
        problem = Problem(str(path), None, "does not exist", _files_beside(path))
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        problem = Problem(str(path), None, f"cannot be read: {' '.join(str(error).split())}")
    return OmegaConf.create(), {}, [problem]


def _read(path: str | Path | None, words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any], list[Problem]]:
    """Merge file and words. Returns values, the text that each was written as, and problems."""
    layer, raw, problems = _file_layer(Path(path)) if path is not None else (OmegaConf.create(), {}, [])
    layers: list[DictConfig | ListConfig] = [layer]
    known = _known()
    for each in words:
        name, equals, value = each.partition("=")
        if not equals or not re.fullmatch(r"[a-z_0-9]+(\.[a-z_0-9]+)*", name):
            problems.append(Problem(each, None, "is not a setting", "section.key=value, without + or ~"))
            continue
        if name in _section_types():
            problems.append(_unknown(name, value, list(known)))
            continue
        try:
            layers.append(OmegaConf.from_dotlist([each]))
            raw[name] = value
        except (ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
            problems.append(Problem(each, None, f"cannot be read: {' '.join(str(error).split())}"))
    given: dict[str, Any] = {}
    for one in layers:
        tree = OmegaConf.to_container(one)
        assert isinstance(tree, dict)
        given |= flat(tree)
    for name in [k for k, v in given.items() if k in known and isinstance(v, (str, list)) and "${" in str(v)]:
        try:
            found = OmegaConf.select(OmegaConf.merge(*layers), name)
            given[name] = OmegaConf.to_container(found, resolve=True) if isinstance(found, ListConfig) else found
        except OmegaConfBaseException as error:
            problems.append(Problem(name, given.pop(name), f"cannot be resolved: {str(error).splitlines()[0]}"))
    return given, raw, problems


def _files_beside(path: Path) -> str:
    folders = (path.parent, Path("experiments/configs"))  # of this checkout
    found = next((names for f in folders if (names := sorted(str(p) for p in f.glob("*.yaml")))), [])
    return ", ".join(difflib.get_close_matches(str(path), found, cutoff=0.3) or found)


def _validated(
    given: Mapping[str, Any],
    raw: Mapping[str, Any],
    problems: list[Problem],
    checks: Sequence[Check],
    world: int | None,
) -> RunConfig:
    """Problems of single keys first; the rules that join keys are tried on what remains."""
    known = _known()
    good: dict[str, Value] = {}
    for name, value in given.items():
        if name in _section_types() and value in (None, {}):
            continue  # an empty section
        if name not in known:
            problems.append(_unknown(name, value, list(known)))
        elif bad := list(_bad_values(name, value, raw.get(name), *known[name])):
            problems += bad
        else:
            good[name] = _made(value, *known[name])
    config = replace(RunConfig(), preset_values(str(good.get(PRESET, "none"))) | good)
    rules = [p for s in dataclasses.fields(config) for p in getattr(getattr(config, s.name), "problems", tuple)()]
    rules += config.problems()
    unclear = {p.key for p in [*problems, *rules] if p.key.endswith(".degree")}
    config = replace(config, {k: 1 for k in unclear if k in known})
    config, wrong = with_world(config, None if unclear else world)
    rules += wrong
    rules += [p for check in checks for p in check(config)]
    reported = {p.key for p in problems}
    problems += [p for p in rules if p.key not in reported]
    if problems:
        raise ConfigError(problems)
    return config


def _unknown(name: str, value: object, known: list[str]) -> Problem:
    sections = sorted({k.partition(".")[0] for k in known})
    if name in sections:
        return Problem(name, value, "is a section, not a key", ", ".join(k for k in known if k.startswith(name + ".")))
    section, _, leaf = name.rpartition(".")
    inside = [k for k in known if k.startswith(section + ".")]
    near = [k for k in known if k.endswith("." + leaf)]  # in another section
    near = near or [f"{section}.{k}" for k in difflib.get_close_matches(leaf, [k.partition(".")[2] for k in inside])]
    near = near or ([] if inside else difflib.get_close_matches(name, known, n=1))
    legal = near or inside or [s + ".*" for s in sections]
    return Problem(name, value, f"is not a key{f', did you mean {near[0]}?' if near else ''}", ", ".join(legal))


def _bad_values(name: str, value: Any, raw: Any, kind: Any, limits: Mapping[str, Any]) -> Iterator[Problem]:
    """What is wrong with a value, or with each element of a list; one value stands for a list of one."""
    if get_origin(kind) is tuple and isinstance(value, (list, tuple)):
        written = yaml.load(raw, yaml.BaseLoader) if isinstance(raw, str) else raw
        texts = written if isinstance(written, list) and len(written) == len(value) else [None] * len(value)
        for i, (element, text) in enumerate(zip(value, texts, strict=True)):
            yield from _bad_values(f"{name}[{i}]", element, text, get_args(kind)[0], limits)
        return
    one = get_args(kind)[0] if get_origin(kind) is tuple else kind
    if bad := _bad_value(name, value, raw if isinstance(raw, str) else None, one, limits):
        yield dataclasses.replace(bad, legal=_legal(kind, limits))


def _made(value: Any, kind: Any, limits: Mapping[str, Any]) -> Any:
    """A value that has the type, as the config holds it."""
    if get_origin(kind) is tuple:
        elements = value if isinstance(value, (list, tuple)) else [value]
        return tuple(_made(v, get_args(kind)[0], limits) for v in elements)
    if limits["path"]:  # of `~/x` or `file:~/x`; a shell does it at the beginning of a word only
        return re.sub("^(file:)?(~[^/]*)", lambda m: (m[1] or "") + os.path.expanduser(m[2]), value)  # noqa: PTH111
    return float(value) if kind is float else value


def _bad_value(name: str, value: Any, raw: str | None, kind: Any, limits: Mapping[str, Any]) -> Problem | None:
    legal = _legal(kind, limits)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if raw is not None and "${" in raw:
        raw = None  # what it stands for counts
    shown = _shown(value, raw)
    if number and raw is not None and not _plain(raw):
        return Problem(name, raw, f"would be read as {value}: write a plain decimal number", legal)
    if number and value == 0 and raw is not None and re.search("[1-9]", raw.lower().partition("e")[0]):
        return Problem(name, raw, f"would be read as {value}: it is too near to zero", legal)
    if not _has_type(value, kind):
        return Problem(name, shown, f"is not {_type_name(kind)}", legal)
    if isinstance(value, str) and raw is not None and raw[:1] not in ("'", '"') and raw.strip() != value:
        return Problem(name, raw, f"would be read as {value}: put it in quotes", legal)
    if kind is float and not abs(value) <= sys.float_info.max:
        return Problem(name, shown, "must be finite", legal)
    low, high = limits["at_least"], limits["at_most"]
    if number and ((low is not None and value < low) or (high is not None and value > high)):
        return Problem(name, shown, "is out of range", legal)
    return None


def _shown(value: object, raw: str | None) -> object:
    """A value as a message tells it: as it was written, text that looks like something else in quotes."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return _bare_or_quoted(value)
    return raw or (str(value) if isinstance(value, float) else value)


def _plain(raw: str) -> bool:
    """A number as people mean it; YAML 1.1 also reads 12:30 as 750 and 010 as 8."""
    return re.fullmatch(r"[-+]?(0|[1-9][0-9_]*)?(\.[0-9]*)?([eE][-+]?[0-9]+)?|[-+]?\.(inf|nan)", raw, re.I) is not None


def _has_type(value: object, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return any(value == v and type(value) is type(v) for v in get_args(kind))
    if get_origin(kind) in (Union, types.UnionType):
        return any(_has_type(value, k) for k in get_args(kind))
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is kind


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of its choices"
    return {int: "an integer", float: "a number", bool: "a truth value", str: "text"}.get(kind, str(kind))


def _legal(kind: Any, limits: Mapping[str, Any]) -> str:
    if get_origin(kind) is tuple:
        return f"one or a list; each {_legal(get_args(kind)[0], limits)}"
    if get_origin(kind) is Literal:
        return ", ".join(map(str, get_args(kind)))
    low, high = limits["at_least"], limits["at_most"]
    if low is not None and high is not None:
        return f"{text_of(low)} to {text_of(high)}"
    if low is not None:
        return f"{_type_name(kind)}, at least {text_of(low)}"
    return "true, false" if kind is bool else _type_name(kind)
