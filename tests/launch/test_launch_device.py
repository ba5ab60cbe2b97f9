"""Which device and how many threads a rank takes."""

import os

import pytest
import torch

from research.config import LaunchConfig
from research.launch.process import Place, choose_device, threads


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


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_more_ranks_than_devices_are_refused(taken: list[torch.device], device: str) -> None:
    told = f"launch.device={device}: this node has 2 CUDA devices for 3 ranks; legal: cpu, or at most 2 ranks on a node"
    with pytest.raises(ValueError, match=f"^{told}$"):
        choose_device(Place(2, 3, 2, 3), LaunchConfig(device=device))
    assert taken == []


def test_cpu_is_cpu_where_there_are_devices(taken: list[torch.device]) -> None:
    assert choose_device(Place(0, 1, 0, 1), LaunchConfig(device="cpu")) == torch.device("cpu") and taken == []


def test_without_devices_auto_is_cpu_and_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    place = Place(0, 1, 0, 1)
    assert choose_device(place, LaunchConfig(device="auto")) == torch.device("cpu")
    with pytest.raises(ValueError, match="device=cuda: this node has 0 CUDA devices for 1 ranks; legal: cpu"):
        choose_device(place, LaunchConfig(device="cuda"))


@pytest.mark.parametrize(
    ("given", "cores", "local_world", "taken"), [(0, 8, 2, 4), (0, 8, 3, 2), (0, 2, 4, 1), (0, 8, 1, 8), (3, 8, 4, 3)]
)
def test_ranks_of_a_node_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, given: int, cores: int, local_world: int, taken: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert threads(Place(0, 8, 0, local_world), LaunchConfig(threads=given)) == taken
