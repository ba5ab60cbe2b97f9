"""Which checkpoint a run starts from, and where its own go: told from the config, before anything is computed."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from research.config import ConfigError, Problem, RunConfig
from research.files import writable
from research.record import row_path, run_id
from research.settings import flat, to_mapping
from research.train.checkpoint.index import CheckpointError, complete, newest, offer, read_index

OWN = ("latest", "auto")  # of this run's own folder


def folder_of(config: RunConfig) -> Path:
    """Where the checkpoints of this run go."""
    chosen = config.checkpoint.folder
    return Path(chosen) if chosen else Path(config.record.folder) / "checkpoints" / run_id(config)


def resumed_from(config: RunConfig) -> Path | None:
    """The checkpoint that this run goes on from; None: it starts anew.

    Raises ConfigError where there is none although one is asked for, where it is damaged or has all steps made, and
    where this run would write its checkpoints among those of another one.
    """
    c, own = config.checkpoint, folder_of(config)
    found = newest(own if c.resume in OWN else Path(c.resume)) if c.resume else None
    problems = []
    if c.resume and c.resume != "auto" and found is None:
        place = own if c.resume == "latest" else c.resume
        rule = f"finds no complete checkpoint in {place}"
        problems.append(Problem("checkpoint.resume", c.resume, rule, "the folder of a checkpoint or of a run, or auto"))
    if found is not None:
        problems += _unusable(config, found)
    others = [p for p in complete(own) if c.every and (found is None or found.parent.resolve() != own.resolve())]
    if others:
        rule = f"would write among the checkpoints of an earlier run, the last of them {others[-1]}"
        legal = "checkpoint.resume=latest or auto, or another checkpoint.folder"
        problems.append(Problem("checkpoint.every", c.every, rule, legal))
    if problems:
        raise ConfigError(problems)
    return found


def _unusable(config: RunConfig, found: Path) -> Iterator[Problem]:
    try:
        done = read_index(found).state.get("step", -1)
    except CheckpointError as error:
        yield Problem("checkpoint.resume", config.checkpoint.resume, f"is damaged: {error}{offer(found)}")
        return
    if done >= (steps := config.train.steps):
        yield Problem("train.steps", steps, f"are made already in {found}", f"more than {done}")


def reopen(config: RunConfig) -> None:
    """A run that was killed between its last checkpoint and its row has nothing left to do, and yet no row. Without
    that checkpoint it makes its last steps again; only for who knows that nobody is at the run."""
    own = folder_of(config)
    last = newest(own) if config.checkpoint.resume in OWN else None
    if last is None or row_path(config.record.folder, run_id(config)).exists():
        return
    with contextlib.suppress(CheckpointError):  # a damaged one is to be named
        if read_index(last).state.get("step", -1) >= config.train.steps:
            shutil.rmtree(last)


def changed_since(config: RunConfig, checkpoint: Path) -> Iterator[str]:
    """Keys of model, data and train that differ from those of the checkpoint's run; with any, this is a branch."""
    now, before = (dict(flat(c)) for c in (to_mapping(config), read_index(checkpoint).state["config"]))
    for name, value in now.items():
        if name.partition(".")[0] in ("model", "data", "train") and value != before.get(name, value):
            yield f"{name}={value} was {before[name]}"


def weights_from(config: RunConfig) -> Path | None:
    """The checkpoint whose weights replace the initial ones. Raises ConfigError where there is none."""
    place = config.checkpoint.weights
    if place and (found := newest(Path(place))) is not None:
        return found
    if place:
        legal = "the folder of a checkpoint or of a run"
        raise ConfigError([Problem("checkpoint.weights", place, "holds no complete checkpoint", legal)])
    return None


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
