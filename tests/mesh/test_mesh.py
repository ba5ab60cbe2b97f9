"""Who stands where, against torch's own device mesh, and the boxes that ranks hold."""

import itertools
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from research import comm
from research.config import LaunchConfig, RunConfig, replace
from research.launch.local import start
from research.launch.process import fake_process_group
from research.mesh import DENSE, EXPERT, Layout, Mesh, total_ranks
from research.problems import ConfigError
from research.settings import load

SIZES = [
    {"pp": 2, "dp": 2, "cp": 2, "tp": 2, "ep": 4},
    {"pp": 1, "dp": 3, "cp": 1, "tp": 2, "ep": 2},
    {"pp": 2, "dp": 2, "cp": 1, "tp": 2, "ep": 2, "etp": 2},
    {"pp": 3, "dp": 1, "cp": 2, "tp": 2, "ep": 1},
]


@pytest.mark.parametrize("sizes", SIZES)
def test_groups_equal_torch_device_mesh(sizes):
    world = Mesh(sizes).world
    for rank in range(world):
        with fake_process_group(world, rank):
            mesh = Mesh(sizes, rank, fake=True)
            for view in (DENSE, EXPERT):
                theirs = dist.device_mesh.init_device_mesh(
                    "cpu", tuple(mesh.sizes[a] for a in view), mesh_dim_names=view
                )
                for axis in view:
                    group = mesh.group(axis)
                    assert group.ranks == tuple(dist.get_process_group_ranks(theirs[axis].get_group()))
                    assert group.rank == theirs[axis].get_local_rank() == mesh.at[axis]
                    assert group.axis == axis


@pytest.mark.parametrize("sizes", SIZES)
def test_both_views_name_each_rank_once(sizes):
    mesh = Mesh(sizes)
    for view in (DENSE, EXPERT):
        seen = {tuple(mesh.coordinates(r)[a] for a in view) for r in range(mesh.world)}
        assert seen == set(itertools.product(*(range(mesh.sizes[a]) for a in view)))
    assert mesh.sizes["edp"] * mesh.sizes["ep"] * mesh.sizes["etp"] == mesh.stage_ranks


def test_stage_and_world():
    sizes = SIZES[0]
    with fake_process_group(16, 9):
        mesh = Mesh(sizes, 9, fake=True)
        assert mesh.group("stage").ranks == tuple(range(8, 16))
        assert mesh.group("sample").ranks == (8, 9, 10, 11)
        assert mesh.group("world").ranks == tuple(range(16))


def early_receives(place, device):
    """Both ranks post a receive before they send, over groups that connect as those of NCCL do."""
    mesh, connected = Mesh({"pp": 2}, place.rank), set()
    real = {name: getattr(dist, name) for name in ("send", "recv", "isend", "irecv")}

    def first(name, t, other, group):
        if group not in connected:
            connected.add(group)
            here, there = torch.zeros(1), torch.zeros(1)
            for work in (real["isend"](here, other, group), real["irecv"](there, other, group)):
                work.wait()
        return real[name](t, other, group)

    for name in real:
        setattr(dist, name, partial(first, name))
    out, back = mesh.way(0, 1), mesh.way(1, 0)
    mine, theirs = (out, back) if place.rank == 0 else (back, out)
    x = torch.full((3,), float(place.rank))
    coming = comm.start_receive(torch.empty(3), theirs, "test")
    comm.start_send(x, mine, "test").wait()
    return coming.wait().tolist()


def test_ways_are_connected_when_they_are_made(monkeypatch):
    assert start(early_receives, 2, LaunchConfig(), 30) == [[1.0] * 3, [0.0] * 3]
    monkeypatch.setattr("research.mesh.connect", lambda way: None)
    with pytest.raises(TimeoutError):
        start(early_receives, 2, LaunchConfig(), 3)


def test_expert_ranks_must_fold():
    with pytest.raises(ValueError, match=r"ep\*etp=3 must divide dp\*cp\*tp=4"):
        Mesh({"dp": 4, "ep": 3})
    with pytest.raises(ValueError, match="rank 4 is not in a world of 4"):
        Mesh({"dp": 4}, rank=4)


LAYOUTS = [
    Layout(("vocab", "dim"), (250, 64), (1, 1), (("tp", 4), None)),  # padded: 63, 63, 63, 61
    Layout(("heads", "dim"), (8, 64), (8, 1), (("tp", 4), None)),
    Layout(("kv_heads", "dim"), (2, 64), (8, 1), (("tp", 4), None)),  # copies
    Layout(("expert", "expert_ffn", "dim"), (8, 32, 64), (1, 1, 1), (("ep", 4), ("etp", 2), None)),
    Layout(("dim",), (64,), (1,), (None,)),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_boxes_cover_the_tensor_and_copies_share_a_group(layout):
    sizes = {"pp": 2, "dp": 2, "tp": 4, "ep": 4, "etp": 2}
    mesh = Mesh(sizes)
    count = torch.zeros(layout.shape, dtype=torch.int)
    boxes = {}
    for rank in range(mesh.stage_ranks):
        box = layout.box(mesh.coordinates(rank))
        boxes.setdefault(box, []).append(rank)
        count[tuple(slice(o, o + n) for o, n in box)] += 1
        assert all(n <= m for (_, n), m in zip(box, layout.local_shape(), strict=True))
    assert count.min() >= 1
    for box, ranks in boxes.items():
        for rank in ranks:
            with fake_process_group(mesh.world, rank):
                replicas = Mesh(sizes, rank, fake=True).replicas(layout)
            assert replicas.ranks == tuple(ranks)
            assert replicas.axis == {2: "dp*tp", 4: "dp*tp"}.get(LAYOUTS.index(layout), "dp")
        assert (count[tuple(slice(o, o + n) for o, n in box)] == len(ranks)).all()


def test_a_large_world_costs_little():
    start = time.monotonic()
    with fake_process_group(16384, 5000):
        mesh = Mesh({"pp": 16, "dp": 16, "cp": 8, "tp": 8, "ep": 64}, 5000, fake=True)
        sizes = [mesh.group(a).size for a in (*DENSE, "ep", "edp", "stage", "sample", "world")]
    assert sizes == [16, 16, 8, 8, 64, 16, 1024, 64, 16384]
    assert time.monotonic() - start < 20


def test_degree_is_what_the_world_leaves_over():
    assert load(None, world=6).dp.degree == 6
    assert load(None).dp.degree == 1
    assert total_ranks(load(None, ["dp.degree=4"])) == 4
    with pytest.raises(ConfigError, match=r"dp.degree=4 .*must equal the world of 6 ranks"):
        load(None, ["dp.degree=4"], world=6)
    with pytest.raises(ValueError, match="the degrees make 2 ranks, the world has 3"):
        Mesh.from_config(replace(RunConfig(), {"dp.degree": 2}), 3, 0)
