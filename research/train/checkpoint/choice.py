"""Which checkpoint a run starts from, and where its own go: told from the config, before anything is computed."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from research.config import RunConfig
from research.files import writable
from research.problems import ConfigError, Problem, text_of
from research.record import identity_of, row_path, run_id
from research.settings import flat, to_mapping
from research.train.checkpoint.index import (
    PLACES,
    CheckpointError,
    absence,
    complete,
    damage,
    damaged,
    find,
    newest,
    open_index,
    read_index,
)

OWN = ("latest", "auto")  # of this run's own folder


def folder_of(config: RunConfig) -> Path:
    """Where the checkpoints of this run go."""
    chosen = config.checkpoint.folder
    return Path(chosen) if chosen else Path(config.record.folder) / "checkpoints" / run_id(config)


def resumed_from(config: RunConfig, verify: bool = False) -> Path | None:
    """The checkpoint that this run goes on from; None: it starts anew.

    Raises ConfigError where there is none although one is asked for, where it is damaged or has all steps made, and
    where this run would write its checkpoints among those of another one. Ranks hold files to their checksums when they
    load them; `verify`: here it is done where nothing would be loaded.
    """
    c, own = config.checkpoint, folder_of(config)
    place = own if c.resume in OWN else Path(c.resume)
    found = newest(place) if c.resume else None
    problems = []
    if c.resume and c.resume != "auto" and found is None:
        rule = f"cannot be followed: {_none_of_its_own(config) if place == own else f'{place} {absence(place)}'}"
        problems.append(Problem("checkpoint.resume", c.resume, rule, f"{PLACES}, or auto"))
    if found is not None:
        problems += _unusable(config, found, verify)
    others = [p for p in complete(own) if c.every and (found is None or found.parent.resolve() != own.resolve())]
    if others:
        rule = f"would write among the checkpoints of an earlier run, the last of them {others[-1]}"
        legal = "checkpoint.resume=latest or auto, or another checkpoint.folder"
        problems.append(Problem("checkpoint.every", c.every, rule, legal))
    if problems:
        raise ConfigError(problems)
    return found


def _unusable(config: RunConfig, found: Path, verify: bool) -> Iterator[Problem]:
    try:
        index = open_index(found)
        done, steps = index.state.get("step", -1), config.train.steps
        if done >= steps:  # only a whole one has made them
            if wrong := list(damage(found, index.files, index.files, contents=verify)):
                raise damaged(found, wrong)
            yield Problem("train.steps", steps, f"are made already in {found}", f"more than {done}")
    except CheckpointError as error:
        yield Problem("checkpoint.resume", config.checkpoint.resume, f"cannot be followed: {error}")


def reopen(config: RunConfig) -> None:
    """A run that was killed between its last checkpoint and its row has nothing left to do, and yet no row. Without
    that checkpoint it makes its last steps again; only for who knows that nobody is at the run."""
    own = folder_of(config)
    last = newest(own) if config.checkpoint.resume in OWN else None
    if last is None or row_path(config.record.folder, run_id(config)).exists():
        return
    with contextlib.suppress(CheckpointError):  # a damaged one is to be named
        if read_index(last).state.get("step", -1) >= config.train.steps and not list(_differences(config, last)):
            shutil.rmtree(last)


def changed_since(config: RunConfig, checkpoint: Path) -> Iterator[str]:
    """Keys of model, data and train that differ from those of the checkpoint's run; with any, this is a branch."""
    now, before = (dict(flat(c)) for c in (to_mapping(config), read_index(checkpoint).state["config"]))
    for name, value in now.items():
        if name.partition(".")[0] in ("model", "data", "train") and value != before.get(name, value):
            yield f"{name}={value} was {before[name]}"


def told_start(config: RunConfig, resumed: Path | None, weights: Path | None) -> Iterator[str]:
    """Lines on what a run starts from, as `resumed_from` and `weights_from` say."""
    if config.checkpoint.resume == "auto" and resumed is None:
        yield f"starts afresh: {_none_of_its_own(config)}"
    if source := resumed or weights:
        yield f"starts from {source}"
        yield from (f"  {line}" for line in changed_since(config, source))


def _none_of_its_own(config: RunConfig) -> str:
    """That a run has no checkpoint to go on from. The name of its folder changes with every key that changes a result:
    where one that was called alike has checkpoints, these keys are named, of the one that differs least."""
    own = folder_of(config)
    name, _, _ = own.name.rpartition("-")
    beside = [p for p in own.parent.glob("*/") if p.name.rpartition("-")[0] == name]
    alike = [] if config.checkpoint.folder else sorted(beside, key=lambda p: p.stat().st_mtime, reverse=True)
    told = {}
    for checkpoint in filter(None, map(newest, alike)):
        with contextlib.suppress(CheckpointError):
            told[checkpoint.parent] = list(_differences(config, checkpoint))
    if not told:
        return f"{own} holds no complete checkpoint"
    like = min(told, key=lambda folder: len(told[folder]))
    keys = ", ".join(told[like]) or "none, but a file that one of them names"
    return f"the checkpoints in {like} are of another run; keys that differ: {keys}"


def _differences(config: RunConfig, checkpoint: Path) -> Iterator[str]:
    """Keys that make another run of it; one that only one of both knows is null in the other."""
    before, now = (identity_of(c) for c in (read_index(checkpoint).state["config"], to_mapping(config)))
    for name in {**before, **now}:
        if (was := before.get(name)) != (value := now.get(name)):
            yield f"{name} {text_of(was)} -> {text_of(value)}"


def weights_from(config: RunConfig) -> Path | None:
    """The checkpoint whose weights replace the initial ones. Raises ConfigError where there is none, or its index is
    damaged."""
    place = config.checkpoint.weights
    if not place:
        return None
    try:
        found = find(Path(place))
        open_index(found)
    except CheckpointError as error:
        raise ConfigError([Problem("checkpoint.weights", place, f"cannot be followed: {error}")]) from error
    return found


def problems(config: RunConfig) -> Iterator[Problem]:
    """What would lose the checkpoints of a run, or leave open what it starts from."""
    c = config.checkpoint
    if c.every and not writable(folder_of(config)):
        legal = "a folder, made where it is missing"
        yield Problem("checkpoint.folder", c.folder, f"cannot be written to: {folder_of(config)}", legal)
    if c.weights and c.resume not in ("", "auto"):
        rule = f"would be overwritten by checkpoint.resume={c.resume}"
        legal = "one of the two; with auto the weights serve where there is no checkpoint yet"
        yield Problem("checkpoint.weights", c.weights, rule, legal)
