"""What the entry points share: CONFIG and key=value words in, a valid config or all its problems out."""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from research import record, settings
from research.config import RunConfig
from research.data import corpus
from research.launch.environment import Joined, join, joined
from research.launch.local import RankError, start
from research.launch.process import Place, too_few_devices
from research.mesh import total_ranks
from research.parallel import axis
from research.problems import ConfigError, Problem
from research.train.checkpoint import choice
from research.train.metrics import code_version

T = TypeVar("T")
CHECKS = (axis.problems, corpus.problems, record.problems, choice.problems)
RANK_0_SPEAKS_S = 3.0  # a launcher ends all ranks when the first one leaves
HELP = "Keys, with their defaults (any may stand in CONFIG or follow it as key=value):\n\n"


def read_config(words: Sequence[str], where: Joined | None = None) -> RunConfig:
    """The config of `[CONFIG] key=value ...`; CONFIG is a YAML file, or the row of an earlier run."""
    has_file = bool(words) and (re.match(r"[+~]?[a-z_0-9.]+=", words[0]) is None or Path(words[0]).is_file())
    path, rest = (words[0], words[1:]) if has_file else (None, words)
    world = where.place.world if where else None
    checks = CHECKS if where else (*CHECKS, devices_here)
    if path is not None and path.endswith(".json") and Path(path).exists():
        return settings.from_mapping(_config_of_row(path), rest, checks, world)
    return settings.load(path, rest, checks, world)


def _config_of_row(path: str) -> dict[str, Any]:
    """Rows of other versions of this code do as well: only their config is read."""
    try:
        row = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError([Problem(path, None, f"cannot be read: {error}")]) from error
    config = row.get("config") if isinstance(row, dict) else None
    if not isinstance(config, dict):
        raise ConfigError([Problem(path, None, "is no row of a run: it holds no config")])
    return config


def devices_here(config: RunConfig) -> Iterator[Problem]:
    """All ranks will be started on this machine."""
    if config.launch.device == "cuda" and (problem := too_few_devices(total_ranks(config))):
        yield problem


def launch(function: Callable[[Place, torch.device], T], config: RunConfig, where: Joined | None) -> T:
    """Run on all ranks, started here or joined; returns what rank 0 (or this joined rank) returns."""
    if where is not None:
        return join(function, where, config.launch)
    return start(function, total_ranks(config), config.launch, heeds=config.checkpoint.every > 0)[0]


def main(usage: str | None, body: Callable[[Sequence[str], Joined | None], int], needs: str = "") -> int:
    """Exit status of an entry point: 0, what `body` says, 1 for a failed rank, 2 for bad input, 130 for Ctrl-C.

    `needs` names what the first word must be, if there must be one.
    """
    torch.set_num_threads(1)  # ranks are forked from this process, which computes nothing
    code_version()  # of what was imported; the checkout may move on
    words = sys.argv[1:]
    if "--help" in words or "-h" in words:
        print((usage or "").strip(), "\n\n" + HELP + settings.help_text())
        return 0
    if needs and not words:
        print(f"which {needs}? --help says more", file=sys.stderr)
        return 2
    try:
        where = joined()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        return body(words, where)
    except ConfigError as error:
        if where is not None and where.place.rank > 0:
            time.sleep(RANK_0_SPEAKS_S)  # it ends this rank where it has the same to say
            print(f"rank {where.place.rank}:", file=sys.stderr)
        print(error, file=sys.stderr)
        return 2
    except (RankError, TimeoutError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: all ranks are ended, finished rows are kept", file=sys.stderr)
        return 130
