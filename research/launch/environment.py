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
    Raises ValueError where the launcher's variables are incomplete or no numbers."""
    if "RANK" in environment or "WORLD_SIZE" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    elif "SLURM_STEP_ID" in environment and environment.get("SLURM_STEP_NUM_TASKS") != "1":
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
    else:
        return None
    missing = [n for n in (*names, "MASTER_ADDR", "MASTER_PORT") if n not in environment]
    if missing:
        given = next((n for n in names if n in environment), "SLURM_STEP_ID")
        raise ValueError(f"a launcher set {given}, but not {', '.join(missing)}")
    # Slurm writes "4(x2),3" for two nodes of 4 tasks and one of 3; ranks are placed alike on all full nodes.
    written = [environment[n] for n in names]
    try:
        rank, world, local_rank, local_world = (int(text.split("(")[0].split(",")[0]) for text in written)
    except ValueError:
        raise ValueError(f"a launcher set {', '.join(names)} to {', '.join(written)}: these are no numbers") from None
    place = Place(rank, world, local_rank, local_world)
    return Joined(place, f"tcp://{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}")


def join(function: Callable[[Place, torch.device], T], where: Joined, config: LaunchConfig) -> T:
    """Run `function(place, device)` as this one rank."""
    with process_group(where.place, config, where.init_method) as device:
        return function(where.place, device)
