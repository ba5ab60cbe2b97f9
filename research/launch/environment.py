"""Join a world that torchrun or srun has started: rank and rendezvous come from their environment variables."""

import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from research.config import LaunchConfig
from research.launch.process import Place, process_group

T = TypeVar("T")
# Below the range from which systems hand out ports themselves; neighbouring jobs get neighbouring ports.
FIRST_PORT, PORTS, STEP_STRIDE = 20000, 12000, 1009


@dataclass(frozen=True)
class Joined:
    """A place in a world that somebody else started, and where its ranks meet."""

    place: Place
    init_method: str


def joined(environment: Mapping[str, str] = os.environ) -> Joined | None:
    """What torchrun (RANK, WORLD_SIZE, ..) or srun (SLURM_PROCID, SLURM_STEP_NUM_TASKS, .. inside a step) says; None
    without either. A step of one task is a shell (salloc, srun --pty) or has nobody to join: None as well.

    Where srun's ranks meet follows from its variables, unless MASTER_ADDR and MASTER_PORT say it: the first host of the
    step, and a port that neighbouring jobs and steps do not share.
    Raises ValueError where the launcher's variables are incomplete, no numbers, do not tell how many ranks this node
    has, or name a meeting place that other nodes cannot reach."""
    if "RANK" in environment or "WORLD_SIZE" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        meeting = ["MASTER_ADDR", "MASTER_PORT"]
    elif "SLURM_STEP_ID" in environment and environment.get("SLURM_STEP_NUM_TASKS") != "1":
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
        instead = {"MASTER_ADDR": "SLURM_STEP_NODELIST", "MASTER_PORT": "SLURM_JOB_ID"}
        meeting = [name for said, name in instead.items() if said not in environment]
    else:
        return None
    missing = [n for n in (*names, *meeting) if n not in environment]
    if missing:
        given = next((n for n in names if n in environment), "SLURM_STEP_ID")
        raise ValueError(f"a launcher set {given}, but not {', '.join(missing)}")
    written = [environment[n] for n in names]
    try:
        rank, world, local_rank = (int(text) for text in written[:3])
        each = tasks(written[3])
    except ValueError:
        raise ValueError(f"a launcher set {', '.join(names)} to {', '.join(written)}: these are no numbers") from None
    uneven = len(each) if len(set(each)) > 1 else 0
    node = environment.get("SLURM_NODEID", "") if uneven else "0"
    if not node.isdecimal() or int(node) >= len(each):
        rule = f"and SLURM_NODEID={node or '(unset)'} does not tell which of its {uneven} nodes this one is"
        raise ValueError(f"a launcher set {names[3]}={written[3]}, {rule}; legal: 0 to {uneven - 1}")
    local_world = each[int(node)]
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if host is None:
        host = hosts(environment["SLURM_STEP_NODELIST"])[0]
    if port is None:
        step = int(environment["SLURM_STEP_ID"])
        port = str(FIRST_PORT + (int(environment["SLURM_JOB_ID"]) + step * STEP_STRIDE) % PORTS)
    by_srun = names[0] == "SLURM_PROCID"  # torchrun's nodes may be several on one machine, to try things
    if by_srun and world > local_world and (host in ("", "localhost", "::1") or host.startswith("127.")):
        raise ValueError(
            f"a launcher set MASTER_ADDR={host}, which other nodes cannot reach; legal: the host of rank 0"
        )
    cpus = environment.get("SLURM_CPUS_PER_TASK", "0") if by_srun else "0"  # torchrun's are of all
    return Joined(Place(rank, world, local_rank, local_world, int(cpus), uneven), f"tcp://{host}:{port}")


def tasks(per_node: str) -> list[int]:
    """Of each node: Slurm writes `4(x2),3` for 4, 4, 3. Raises ValueError on other forms."""
    found: list[int] = []
    for item in per_node.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", item)
        if match is None:
            raise ValueError(f"{per_node!r} is no list of tasks; legal: 4(x2),3")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def hosts(nodelist: str) -> list[str]:
    """Every host of a Slurm node list: `a[01-03,7],b` is a01, a02, a03, a7, b. Raises ValueError on other forms."""
    found: list[str] = []
    name = r"(?:[^,\[\]]|\[[^\[\]]*\])+"
    for item in re.findall(name, nodelist) if re.fullmatch(f"{name}(,{name})*", nodelist) else []:
        names = [""]
        for text, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", item):
            parts = [text] if text else [n for r in ranges.split(",") for n in _numbers(r, nodelist)]
            names = [name + part for name in names for part in parts]
        found += names
    if not found:
        raise ValueError(f"{nodelist!r} is no list of nodes; legal: a[01-03,7],b")
    return found


def _numbers(text: str, nodelist: str) -> list[str]:
    """`01-03` -> 01, 02, 03, with the zeros of its first number."""
    match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", text)
    if match is None:
        raise ValueError(f"{nodelist!r} is no list of nodes: {text!r} is no number or range; legal: a[01-03,7],b")
    first, last = match[1], match[2] or match[1]
    return [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]


def join(function: Callable[[Place, torch.device], T], where: Joined, config: LaunchConfig) -> T:
    """Run `function(place, device)` as this one rank."""
    threading.excepthook = _leave
    with process_group(where.place, config, where.init_method) as device:
        return function(where.place, device)


def _leave(failed: threading.ExceptHookArgs) -> None:
    """An error in any thread ends this rank; the launcher then ends the others."""
    traceback.print_exception(failed.exc_value)
    sys.stderr.flush()
    os._exit(1)
