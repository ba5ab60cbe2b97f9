"""Which device, how many threads and what memory a rank takes."""

import os
import platform
import resource
import subprocess
import sys

import pytest
import torch

from research.config import LaunchConfig
from research.launch import process
from research.launch.process import Place, choose_device, threads
from research.problems import ConfigError


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Devices that were made the current one, on a machine with 2 of them."""
    found: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    return found


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_each_rank_of_a_node_takes_its_own_device(taken: list[torch.device], device: str) -> None:
    places = [Place(rank, 4, rank % 2, 2) for rank in range(4)]
    found = [choose_device(place, LaunchConfig(device=device)) for place in places]
    assert found == taken == [torch.device("cuda", i) for i in (0, 1, 0, 1)]


def test_more_ranks_than_devices(taken: list[torch.device]) -> None:
    """`cuda` is refused on every rank, also those that would have a device; `auto` is the CPU on every rank."""
    told = "launch.device=cuda needs a device for each rank of a node: this one has 2 for 3 ranks; legal: cpu, auto, or"
    for rank in range(3):
        with pytest.raises(ConfigError, match=told):
            choose_device(Place(rank, 3, rank, 3), LaunchConfig(device="cuda"))
        assert choose_device(Place(rank, 3, rank, 3), LaunchConfig(device="auto")) == torch.device("cpu")
    assert taken == []


def test_cpu_is_cpu_where_there_are_devices(taken: list[torch.device]) -> None:
    assert choose_device(Place(0, 1, 0, 1), LaunchConfig(device="cpu")) == torch.device("cpu") and taken == []


def test_without_devices_auto_is_cpu_and_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    place = Place(0, 1, 0, 1)
    assert choose_device(place, LaunchConfig(device="auto")) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"this one has 0 for 1 ranks; legal: cpu, auto$"):
        choose_device(place, LaunchConfig(device="cuda"))


@pytest.mark.parametrize(
    ("given", "cores", "local_world", "taken"), [(0, 8, 2, 4), (0, 8, 3, 2), (0, 2, 4, 1), (0, 8, 1, 8), (3, 8, 4, 3)]
)
def test_ranks_of_a_node_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, given: int, cores: int, local_world: int, taken: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert threads(Place(0, 8, 0, local_world), LaunchConfig(threads=given)) == taken


FAULTS = """
import resource, sys, torch
from research.launch.process import keep_freed_memory

def use():
    blocks = [torch.zeros(2**22) for _ in range(8)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

assert sys.argv[1] == "planted" or keep_freed_memory()
counted = [use() for _ in range(30)]
print(counted[-1] - counted[9])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a C library that cannot be told")
def test_freed_memory_stays() -> None:
    """Pages that the system hands out anew while the same 128 MiB are asked for and freed 20 times, in a process that
    gives blocks of 1 MiB back: it would learn to keep some, but which ones is chance."""
    within = {"env": {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}, "timeout": 60}
    kept, planted = (
        int(subprocess.run([sys.executable, "-c", FAULTS, w], check=True, capture_output=True, **within).stdout)
        for w in ("kept", "planted")
    )
    once = 128 * 2**20 // resource.getpagesize()
    assert kept < once < 10 * once < planted


@pytest.mark.parametrize(("device", "times"), [("cpu", 1), ("cuda", 0)])
def test_freed_memory_stays_with_ranks_on_a_cpu(
    taken: list[torch.device], monkeypatch: pytest.MonkeyPatch, device: str, times: int
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(process, "keep_freed_memory", lambda: asked.append(True))
    with process.process_group(Place(0, 1, 0, 1), LaunchConfig(device=device, threads=1), ""):
        pass
    assert len(asked) == times
