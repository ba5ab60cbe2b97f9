"""A sweep as arrays of jobs: one array for all runs that ask for the same resources."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from research import attempts
from research.attempts import claimed
from research.config import RunConfig
from research.mesh import total_ranks
from research.problems import Problem, divisors
from research.sweep.scheduler import submit
from research.sweep.state import prepared

SCRIPT = Path("slurm/ablate.sbatch")


@dataclass(frozen=True)
class Array:
    """Runs that one array job can hold, and the options of sbatch that they share."""

    runs: tuple[RunConfig, ...]
    options: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """For people to read."""
        return ["sbatch", *self.options, str(SCRIPT), self.runs[0].slurm.launcher, f"({len(self.runs)} runs)"]


def problems(config: RunConfig) -> Iterator[Problem]:
    """What would make a job that cannot start. Ranks of a run stand on its nodes in equal numbers."""
    ranks, nodes = total_ranks(config), config.slurm.nodes
    if ranks % nodes:
        yield Problem("slurm.nodes", nodes, f"must divide the {ranks} ranks of the run", divisors(ranks))
    if not SCRIPT.is_file():
        yield Problem(str(SCRIPT), None, f"is not in {Path.cwd()}", "--submit from the root of the repository")


def arrays(runs: Sequence[RunConfig]) -> list[Array]:
    groups: dict[tuple[str, ...], list[RunConfig]] = {}
    for config in runs:
        groups.setdefault(_options(config), []).append(config)
    made = []
    for options, members in groups.items():
        at_once = members[0].slurm.at_once
        indices = f"--array=0-{len(members) - 1}" + (f"%{at_once}" if at_once else "")
        made.append(Array(tuple(members), (indices, *options)))
    return made


def _options(config: RunConfig) -> tuple[str, ...]:
    s, ranks = config.slurm, total_ranks(config)
    tasks = ranks // s.nodes
    given = {
        "job-name": config.record.ablation,
        "nodes": s.nodes,
        "ntasks-per-node": tasks,
        "cpus-per-task": s.cpus,
        "gpus-per-node": tasks if config.launch.device == "cuda" else 0,
        "partition": s.partition,
        "account": s.account,
        "qos": s.qos,
        "time": s.minutes,
        "signal": f"USR1@{s.notice_s}" if config.checkpoint.every else "",
        "output": f"{config.record.folder}/attempts/slurm-%A_%a.out",
    }
    return (
        *(f"--{name}={value}" for name, value in given.items() if value),
        "--requeue",
        "--open-mode=append",
        *s.options,
    )


def send(array: Array, before: Callable[[RunConfig], None] = lambda config: None) -> list[str]:
    """Submit it. Returns the job ids of its runs. Nobody else can start one of them meanwhile; a run that somebody is
    at already finds that out by itself when its turn comes. `before` is called for each of the others."""
    with contextlib.ExitStack() as held:
        folders = [prepared(config) for config in array.runs]
        for config, folder in zip(array.runs, folders, strict=True):
            if held.enter_context(claimed(folder)) is not None:
                before(config)
        array_id = submit(array.options, str(SCRIPT), [array.runs[0].slurm.launcher, *map(str, folders)])
        jobs = [f"{array_id}_{index}" for index in range(len(folders))]
        for config, folder, job in zip(array.runs, folders, jobs, strict=True):
            last = attempts.read(folder) or attempts.new(config)
            told = f"submitted as job {job}"
            attempts.write(
                dataclasses.replace(last, state="pending", job=job, evidence=told, error="", ended=""), folder
            )
    return jobs
