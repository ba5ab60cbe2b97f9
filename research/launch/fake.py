"""A world that does not exist: one process stands for one rank of any number. Collectives return at once and leave what
they should fill as it is, so that only shapes, sizes and counts mean anything."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def fake_world(world: int, rank: int = 0) -> Iterator[None]:
    if world == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
