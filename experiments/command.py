"""What the entry points share: CONFIG and key=value words in, a valid config or all its problems out."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from research import config as configs
from research.config import ConfigError, RunConfig
from research.data import corpus
from research.launch.environment import Joined, join, joined
from research.launch.local import RankError, start
from research.launch.process import Place
from research.mesh import total_ranks
from research.parallel import axis

T = TypeVar("T")
CHECKS = (axis.problems, corpus.problems)
HELP = "Keys, with their defaults (any may stand in CONFIG or follow it as key=value):\n\n"


def read_config(words: Sequence[str], world: int | None = None) -> RunConfig:
    """The config of `[CONFIG] key=value ...`; CONFIG is a YAML file, or the row of an earlier run."""
    has_file = bool(words) and "=" not in words[0]
    path, rest = (words[0], words[1:]) if has_file else (None, words)
    if path is not None and path.endswith(".json") and Path(path).exists():
        row = json.loads(Path(path).read_text(encoding="utf-8"))
        return configs.from_mapping(row.get("config", {}), rest, CHECKS, world)
    return configs.load(path, rest, CHECKS, world)


def launch(function: Callable[[Place, torch.device], T], config: RunConfig, where: Joined | None) -> T:
    """Run on all ranks, started here or joined; returns what rank 0 (or this joined rank) returns."""
    if where is not None:
        return join(function, where, config.launch)
    return start(function, total_ranks(config), config.launch)[0]


def main(usage: str | None, body: Callable[[Sequence[str], Joined | None], int]) -> int:
    """Exit status of an entry point: 0, what `body` says, 1 for a failed rank, 2 for bad input."""
    words = sys.argv[1:]
    if "--help" in words or "-h" in words:
        print((usage or "").strip(), "\n\n" + HELP + configs.help_text())
        return 0
    where = joined()
    try:
        return body(words, where)
    except ConfigError as error:
        if where is None or where.place.rank == 0:
            print(error, file=sys.stderr)
        return 2
    except (RankError, TimeoutError) as error:
        print(error, file=sys.stderr)
        return 1
