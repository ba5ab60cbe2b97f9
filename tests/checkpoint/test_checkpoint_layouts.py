"""Any layout to any other: every copy of every box comes back bit by bit, padding and copies are never written."""

import math

import pytest
import torch

from research.config import LaunchConfig
from research.launch.local import start
from research.parallel.axis import AXES
from research.train.checkpoint.index import read_index, step_folder
from research.train.checkpoint.transfer import Ranks, Saver
from research.train.checkpoint.whole import StoredWeights
from tests.checkpoint.layouts import KINDS, SPLITS, Made, declared, pieces, truth, wrong

LAYOUTS = {
    "one": Made(),
    "tp4": Made(tp=4),  # 250 rows over 4 ranks are padded, 2 kv heads are held by 2 ranks each
    "tp3": Made(tp=3, etp=3),
    "dp3_zero": Made(dp=3, zero=True),
    "dp5_zero": Made(dp=5, zero=True),  # nothing but a width of 50 divides; 6 experts leave rank 3 and 4 without
    "dp2_ep2_pp2": Made(dp=2, pp=2, ep=2),
    "dp4_ep3_zero": Made(dp=6, ep=3, zero=True),
    "tp4_zero": Made(dp=2, tp=4, zero=True),
    "all": Made(dp=2, tp=2, pp=2, ep=2, etp=2, zero=True),
}
LAUNCH = LaunchConfig(device="cpu", threads=1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder -> a checkpoint of each layout."""
    folder = tmp_path_factory.mktemp("saved")
    for name, made in LAYOUTS.items():

        def save(place, device, name=name, made=made):
            saver = Saver(folder / name, Ranks(place.world, place.rank), keep=2, keep_every=0)
            saver.save(1, pieces(made, place.rank), {"step": 1, "config": {}})
            saver.wait()

        start(save, made.world, LAUNCH, 60.0)
    return folder


def test_made_up_layouts_cut_as_the_axes_do():
    splits = {dim: mesh_axis for axis in AXES for dim, mesh_axis in axis.splits.items()}
    assert {dim: SPLITS.get(dim) for dim in splits} == splits


@pytest.mark.parametrize("name", LAYOUTS)
def test_loads_what_any_layout_saved(saved, name):
    def load(place, device):
        ranks, made, found = Ranks(place.world, place.rank), LAYOUTS[name], {}
        for other in LAYOUTS:
            mine = pieces(made, place.rank, math.nan)
            state = ranks.load(step_folder(saved / other, 1), mine, lambda name: True)
            assert state["step"] == 1
            found[other] = wrong(mine)
        return found

    for rank, found in enumerate(start(load, LAYOUTS[name].world, LAUNCH, 100.0)):
        assert found == {other: [] for other in LAYOUTS}, f"rank {rank}"


@pytest.mark.parametrize("name", LAYOUTS)
def test_holds_each_element_once(saved, name):
    checkpoint = step_folder(saved / name, 1)
    index, size = read_index(checkpoint), 0
    for kind in KINDS:
        for full, spec in declared().items():
            entry = index.tensors[f"{kind}/{full}"]
            assert entry.shape == spec.shape
            held = sum(math.prod(n for _, n in box) for box in entry.boxes)
            assert held == math.prod(spec.shape)
            size += held * entry.dtype.itemsize
    stored = sum(f.nbytes for f in index.files.values())
    assert size < stored < size + 400 * len(index.tensors) * len(index.files)  # names and offsets beside the values
    assert {p.name for p in checkpoint.iterdir()} == {"index.json", *index.files}


@pytest.mark.parametrize("name", LAYOUTS)
def test_whole_tensors_without_ranks(saved, name):
    weights = StoredWeights(saved / name)
    assert {n: tuple(t.shape) for n, t in weights} == {n: s.shape for n, s in declared().items()}
    for n, tensor in weights:
        full, shape = f"weight/{n}", declared()[n].shape
        assert torch.equal(tensor, truth(full, shape, tuple((0, k) for k in shape)))
        part = tuple((k // 3, k - k // 3 - k // 5) for k in shape)
        assert torch.equal(weights.read(n, part), truth(full, shape, part))


def test_ranks_share_the_writing(saved):
    """Copies are dealt out: no rank of a pure dp layout writes all."""
    files = read_index(step_folder(saved / "dp2_ep2_pp2", 1)).files
    assert len(files) == 8  # of 4 ranks, weights apart from the rest
