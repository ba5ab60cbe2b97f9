"""Run the arms of an ablation that have no row yet, here or on a cluster, and write its tables.

    python -m experiments.ablate experiments/ablations/quickstart.yaml
    python -m experiments.ablate experiments/ablations/quickstart.yaml train.steps=40 record.folder=results/short
    python -m experiments.ablate FILE --dry                    check every arm, show where each stands, run nothing
    python -m experiments.ablate FILE --submit slurm.partition=gpu slurm.minutes=90      as arrays of jobs
    python -m experiments.ablate FILE --only 'tp*' --limit 2   two of these arms
    python -m experiments.ablate FILE --retry failed           also what failed (or out-of-memory, timed-out alone)

Words after the file change every arm. All arms are checked before the first one runs. What has a row is not run again,
nor what failed, without --retry; what was cancelled is. The exit status is 1 where a run failed.
"""

import argparse
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

from rich.console import Console

from experiments.command import CHECKS, devices_here, main
from experiments.tables import show
from research.ablation import Plan, matching, plan, read, remember
from research.attempts import BAD, Attempt
from research.config import RunConfig
from research.launch.environment import Joined
from research.mesh import total_ranks
from research.problems import ConfigError, Problem
from research.record import read as read_row
from research.record import row_path, run_id
from research.sweep import array
from research.sweep.board import Board
from research.sweep.keep import Notice, keep
from research.sweep.scheduler import Unreachable
from research.sweep.state import RETRY, prepared, standing, to_do
from research.train.checkpoint.choice import reopen

RUN = (sys.executable, "-m", "experiments.run")


def ablate(words: Sequence[str], where: Joined | None) -> int:
    if where is not None:
        raise ConfigError([Problem("experiments.ablate", None, "starts its own ranks", "without torchrun or srun")])
    given = _parsed(words)
    ablation = read(given.file)
    whole = plan(ablation, given.words, (*CHECKS, array.problems if given.submit else devices_here))
    arms = _chosen(list(ablation.arms), given.only)
    runs = [c for c in whole.runs if c.record.arm in arms]
    stand = standing(runs)
    todo = list(to_do(runs, stand, given.retry))[: given.limit]
    states = Counter(a.state for a in stand.values())
    print(f"{ablation.name}: {ablation.question}\nprediction: {ablation.prediction}")
    counts = "".join(f", {n} {state}" for state, n in states.items() if state not in ("done", "pending"))
    print(f"{len(runs)} runs, {states['done']} have their row{counts}, {len(todo)} to do", flush=True)
    if given.dry:
        return _shown(whole, runs, todo if given.submit else [])
    if runs:
        remember(whole, runs[0].record.folder)
    if given.submit:
        return _submitted(todo)
    _run(whole, runs, todo, stand)
    return _told(whole, runs)


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="experiments.ablate", add_help=False, allow_abbrev=False)
    parser.add_argument("file")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--only", default="", metavar="ARM[,ARM ...]")
    parser.add_argument("--retry", default="", choices=list(RETRY))
    parser.add_argument("--limit", type=int)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--submit", action="store_true")
    given = parser.parse_intermixed_args(words)
    if given.limit is not None and given.limit < 0:
        raise ConfigError([Problem("--limit", given.limit, "is out of range", "at least 0")])
    return given


def _chosen(arms: list[str], only: str) -> list[str]:
    """Arms that `--only` names, in patterns; all of them without it."""
    patterns = [p for p in only.split(",") if p]
    table = dict.fromkeys(arms)
    if unknown := [p for p in patterns if not matching(table, [p])]:
        raise ConfigError([Problem("--only", p, "is no arm", ", ".join(arms)) for p in unknown])
    return matching(table, patterns) if patterns else arms


def _shown(whole: Plan, runs: Sequence[RunConfig], todo: Sequence[RunConfig]) -> int:
    """The arms as they stand, and the commands that would submit `todo`."""
    console = Console()
    console.print(Board(whole, runs, console).table())
    for each in array.arrays(todo):
        print(shlex.join(each.command))
    return 0


def _submitted(todo: Sequence[RunConfig]) -> int:
    for each in array.arrays(todo):
        try:
            jobs = array.send(each, before=reopen)
        except Unreachable as error:
            print(error, file=sys.stderr)
            return 1
        for config, job in zip(each.runs, jobs, strict=True):
            print(f"{config.record.arm}, seed {config.train.seed}: job {job}, {total_ranks(config)} ranks")
    return 0


def _run(whole: Plan, runs: Sequence[RunConfig], todo: Sequence[RunConfig], stand: Mapping[str, Attempt]) -> None:
    """One after another, each in a process of its own."""
    with Notice() as notice, Board(whole, runs, Console()) as board:

        def look(config: RunConfig) -> None:
            board.refresh(config)
            notice.check()

        for number, config in enumerate(todo, 1):
            name = f"[{number}/{len(todo)}] {config.record.arm}, seed {config.train.seed}"
            board.say(f"{name}: {total_ranks(config)} ranks")
            folder = prepared(config)
            command = [*RUN, str(folder / "attempt.json")]
            seen = stand[run_id(config)].tries
            attempt = keep(folder, command, seen=seen, tick=partial(look, config), before=partial(reopen, config))
            notice.check()
            if attempt is None:
                board.say("    another process is at it")
            elif attempt.state == "done":
                row = read_row(row_path(config.record.folder, run_id(config)))
                board.say(f"    loss {row.loss:.4f}, {row.speed}, {row.wall_s:.0f} s")
            else:
                board.say(f"    {attempt.reason}; what it printed: {folder / 'output.txt'}")


def _told(whole: Plan, runs: Sequence[RunConfig]) -> int:
    """Tables of what there is, and what failed."""
    stand = standing(runs)
    if any(a.state == "done" for a in stand.values()):
        try:
            show(runs[0].record.folder, whole.ablation.name, ablation=whole.ablation, impossible=whole.impossible)
        except ValueError as error:  # a file among the rows that is none
            print(error, file=sys.stderr)
            return 1
    failed = [a for a in stand.values() if a.state in BAD]
    for attempt in failed:
        print(f"{attempt.arm}, seed {attempt.seed}: {attempt.reason}", file=sys.stderr)
    if failed:
        again = "--retry failed runs them again"
        print(f"{len(failed)} of {len(runs)} runs failed; {again}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(__doc__, ablate, needs="ablation"))
