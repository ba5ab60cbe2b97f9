"""What one process is: its rank, its device, its process group."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from research.config import LaunchConfig
from research.problems import ConfigError, Problem


@dataclass(frozen=True)
class Place:
    """Where a process stands in the world and on its node."""

    rank: int
    world: int
    local_rank: int
    local_world: int  # ranks on this node
    cpus: int = 0  # CPU cores that a launcher gave this rank; 0: it shares those of the node
    uneven_nodes: int = 0  # where nodes have different numbers of ranks, how many there are

    @property
    def nodes(self) -> int:
        return self.uneven_nodes or -(-self.world // self.local_world)


@contextlib.contextmanager
def process_group(place: Place, config: LaunchConfig, init_method: str) -> Iterator[torch.device]:
    """Device, threads and process group of this rank; backend by device: gloo on CPU, NCCL on CUDA.

    The group is left in order on success only: after an error other ranks may never come to the farewell.
    """
    device = choose_device(place, config)
    torch.set_num_threads(threads(place, config))
    if device.type == "cpu":
        keep_freed_memory()
    if place.world > 1:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=init_method,
            rank=place.rank,
            world_size=place.world,
            timeout=timedelta(seconds=config.backend_timeout_s),
            # NCCL then connects groups when they are made, but for messages between two ranks (`mesh.connect`).
            device_id=device if device.type == "cuda" else None,
        )
    yield device
    if place.world > 1:
        dist.barrier()
        dist.destroy_process_group()


def choose_device(place: Place, config: LaunchConfig) -> torch.device:
    """`auto` is CUDA where every rank of the node has a device of its own. Raises ConfigError where `cuda` is asked for
    and there are too few."""
    if config.device == "cpu":
        return torch.device("cpu")
    if problem := too_few_devices(place.local_world):
        if config.device == "cuda":
            raise ConfigError([problem])
        return torch.device("cpu")
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


def keep_freed_memory() -> bool:
    """Of blocks up to 32 MiB, as CUDA's allocator does of all: a training step frees and asks for the same ones again,
    and pages that went back to the system in between cost up to a tenth of its CPU time. Returns whether the C library
    can do that: glibc's can (mallopt(3))."""
    trim_threshold, mmap_threshold = -1, -3  # of malloc.h; 32 MiB is the largest legal one
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(trim_threshold, -1) == mallopt(mmap_threshold, 2**25) == 1


def too_few_devices(ranks: int) -> Problem | None:
    """What is wrong with running so many ranks on the CUDA devices of this node."""
    cuda = torch.cuda.device_count()  # asked of the driver's library: CUDA itself is not started, so forking stays safe
    if ranks <= cuda:
        return None
    rule = f"needs a device for each rank of a node: this one has {cuda} for {ranks} ranks"
    return Problem("launch.device", "cuda", rule, f"cpu, auto{f', or at most {cuda} ranks' if cuda else ''}")


def threads(place: Place, config: LaunchConfig) -> int:
    """CPU threads of this rank."""
    return config.threads or place.cpus or max(1, len(os.sched_getaffinity(0)) // place.local_world)


@contextlib.contextmanager
def fake_process_group(world: int, rank: int) -> Iterator[None]:
    """A world in which every collective returns at once: one process stands for any rank of any number of them."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
