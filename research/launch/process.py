"""What one process is: its rank, its device, its process group."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from research.config import LaunchConfig


@dataclass(frozen=True)
class Place:
    """Where a process stands in the world and on its node."""

    rank: int
    world: int
    local_rank: int
    local_world: int  # ranks on this node

    @property
    def nodes(self) -> int:
        return -(-self.world // self.local_world)


@contextlib.contextmanager
def process_group(place: Place, config: LaunchConfig, init_method: str) -> Iterator[torch.device]:
    """Device, threads and process group of this rank; backend by device: gloo on CPU, NCCL on CUDA.

    The group is left in order on success only: after an error other ranks may never come to the farewell.
    """
    device = choose_device(place, config)
    torch.set_num_threads(threads(place, config))
    if place.world > 1:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=init_method,
            rank=place.rank,
            world_size=place.world,
            timeout=timedelta(seconds=config.backend_timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
    yield device
    if place.world > 1:
        dist.barrier()
        dist.destroy_process_group()


def choose_device(place: Place, config: LaunchConfig) -> torch.device:
    """Raises ValueError where CUDA is asked for and a rank would have no device of its own."""
    cuda = torch.cuda.device_count()
    if config.device == "cpu" or (config.device == "auto" and not cuda):
        return torch.device("cpu")
    if place.local_rank >= cuda:
        have = f"this node has {cuda} CUDA devices for {place.local_world} ranks"
        raise ValueError(f"launch.device={config.device}: {have}; legal: cpu, or at most {cuda} ranks on a node")
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


def threads(place: Place, config: LaunchConfig) -> int:
    """CPU threads of this rank."""
    return config.threads or max(1, len(os.sched_getaffinity(0)) // place.local_world)


@contextlib.contextmanager
def fake_process_group(world: int, rank: int) -> Iterator[None]:
    """A world in which every collective returns at once: one process stands for any rank of any number of them."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
