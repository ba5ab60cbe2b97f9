"""Join a world that torchrun or srun has started: rank and rendezvous come from their environment variables."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from research.config import LaunchConfig
from research.launch.process import Place, process_group

T = TypeVar("T")


@dataclass(frozen=True)
class Joined:
    """A place in a world that somebody else started, and where its ranks meet."""

    place: Place
    init_method: str


def joined(environment: Mapping[str, str] = os.environ) -> Joined | None:
    """What torchrun (RANK, WORLD_SIZE, ..) or srun (SLURM_PROCID, SLURM_STEP_NUM_TASKS, .. inside a step) says; None
    without either. A step of one task is a shell (salloc, srun --pty) or has nobody to join: None as well.
    Raises ValueError where the launcher's variables are incomplete."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    elif "SLURM_STEP_ID" in environment and environment.get("SLURM_STEP_NUM_TASKS") != "1":
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
    else:
        return None
    missing = [n for n in (*names, "MASTER_ADDR", "MASTER_PORT") if n not in environment]
    if missing:
        raise ValueError(f"a launcher set {names[0]}, but not {', '.join(missing)}")
    rank, world, local_rank = (int(environment[n]) for n in names[:3])
    # Slurm writes "4(x2),3" for two nodes of 4 tasks and one of 3; ranks are placed alike on all full nodes.
    local_world = int(environment[names[3]].split("(")[0].split(",")[0])
    place = Place(rank, world, local_rank, local_world)
    return Joined(place, f"tcp://{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}")


def join(function: Callable[[Place, torch.device], T], where: Joined, config: LaunchConfig) -> T:
    """Run `function(place, device)` as this one rank."""
    with process_group(where.place, config, where.init_method) as device:
        return function(where.place, device)
