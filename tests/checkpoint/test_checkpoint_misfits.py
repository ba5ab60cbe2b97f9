"""What does not fit is listed by name, and nothing is half loaded or half saved."""

import itertools

import pytest
import torch

from research.config import LaunchConfig
from research.launch.local import start
from research.train.checkpoint import pieces as pieces_module
from research.train.checkpoint.index import CheckpointError, complete, read_index, step_folder
from research.train.checkpoint.pieces import Piece
from research.train.checkpoint.transfer import Ranks, Saver
from tests.checkpoint.layouts import Made, pieces

LAUNCH = LaunchConfig(device="cpu", threads=1)
ONE = Ranks(1, 0)


def piece(name, shape=(4, 6), box=None, dtype=torch.float32, value=1.0):
    box = tuple((0, n) for n in shape) if box is None else box
    return Piece(name, shape, box, torch.full([n for _, n in box], value, dtype=dtype))


def anything(name):
    return True


@pytest.fixture
def saved(tmp_path):
    ONE.save(tmp_path / "c", lambda: 1, {"step": 1}, [piece("a"), piece("b"), piece("c", dtype=torch.bfloat16)])
    return tmp_path / "c"


def refused(saved, *wanted, widen=False):
    with pytest.raises(CheckpointError) as caught:
        ONE.load(saved, wanted, anything, widen)
    assert all((p.tensor == 0).all() for p in wanted), "half loaded"
    head, *lines = str(caught.value).splitlines()
    assert head == f"checkpoint {saved}: it does not fit, and nothing was loaded:"
    return lines


def test_all_that_does_not_fit_is_listed(saved):
    wanted = [piece("a", value=0), piece("b", (5, 6), value=0), piece("c", value=0), piece("d", value=0)]
    assert refused(saved, *wanted) == [
        "  - b has shape (4, 6) instead of (5, 6)",
        "  - c is torch.bfloat16 instead of torch.float32",
        "  - d is missing",
    ]
    assert refused(saved, piece("a", value=0), piece("c", value=0, dtype=torch.bfloat16)) == ["  - b is one too many"]


def test_a_wider_dtype_holds_the_values_exactly(saved):
    wanted = [piece(n, value=0, dtype=torch.float64) for n in "abc"]
    ONE.load(saved, wanted, anything, widen=True)
    assert all((p.tensor == 1).all() for p in wanted)
    narrow = [piece(n, value=0, dtype=torch.bfloat16) for n in "abc"]
    assert refused(saved, *narrow, widen=True) == [
        f"  - {n} is torch.float32, which torch.bfloat16 does not hold exactly" for n in "ab"
    ]


def test_many_misfits_are_cut_short(saved):
    lines = refused(saved, *(piece(f"x{i}", value=0) for i in range(50)))
    assert len(lines) == 21 and lines[-1] == "  - and 33 more"


def test_planted_moment_that_is_not_saved(tmp_path):
    made = Made()
    found = [p for p in pieces(made, 0) if p.name != "exp_avg_sq/head.weight"]
    ONE.save(tmp_path / "c", lambda: 1, {}, found)
    wanted = pieces(made, 0, 0.0)
    assert refused(tmp_path / "c", *wanted) == ["  - exp_avg_sq/head.weight is missing"]


def test_planted_moment_that_is_not_loaded(tmp_path):
    made = Made()
    ONE.save(tmp_path / "c", lambda: 1, {}, pieces(made, 0))
    wanted = [p for p in pieces(made, 0, 0.0) if p.name != "exp_avg/head.weight"]
    assert refused(tmp_path / "c", *wanted) == ["  - exp_avg/head.weight is one too many"]


def saves_on(world, folder, make):
    """What every rank is told when `make(rank)` is saved."""

    def body(place, device):
        with pytest.raises(CheckpointError) as caught:
            Ranks(place.world, place.rank).save(folder / "c", lambda: 1, {}, make(place.rank))
        return str(caught.value)

    told = start(body, world, LAUNCH, 60.0)
    assert len(set(told)) == 1 and not (folder / "c" / "index.json").exists()
    return told[0]


def test_planted_copy_that_is_written_twice(tmp_path):
    """The copies differ: which one would be right?"""
    told = saves_on(2, tmp_path, lambda rank: [piece("a", value=float(rank))])
    assert told.endswith("\n  - a: boxes [0:4, 0:6] of rank 0 and [0:4, 0:6] of rank 1 are both written, and overlap")


def test_planted_boxes_that_overlap_or_leave_a_gap(tmp_path):
    def make(rank):
        overlapping = piece("a", box=((rank, 2), (0, 6)))
        gap = piece("b", box=((rank * 3, 1), (0, 6)))
        outside = piece("c", box=((rank * 3, 2), (0, 6)))
        other = piece("d", (4, 6) if rank else (5, 6), box=((0, 2), (0, 6)))
        scalar = Piece("e", (), (), torch.tensor(1.0))
        return [overlapping, gap, outside, other, scalar]

    assert saves_on(2, tmp_path, make).splitlines()[1:] == [
        "  - a: boxes [0:2, 0:6] of rank 0 and [1:3, 0:6] of rank 1 are both written, and overlap",
        "  - b: the boxes hold 12 of 24 elements",
        "  - c: box [3:5, 0:6] of rank 1 leaves the shape (4, 6)",
        "  - d: torch.float32 (4, 6) of rank 1 is not the torch.float32 (5, 6) of rank 0",
        "  - e: boxes [] of rank 0 and [] of rank 1 are both written, and overlap",
    ]


def test_the_check_of_boxes_is_exact():
    """Against brute force, over random cuts of a small tensor, right ones and wrong ones."""
    generator = torch.Generator().manual_seed(0)

    def draw(n):
        return int(torch.randint(n, (), generator=generator))

    verdicts = set()
    for _ in range(400):
        cuts = [sorted({0, n, *(draw(n) for _ in range(draw(3)))}) for n in (6, 5)]
        spans = [list(itertools.pairwise(c)) for c in cuts]
        found = [((a, b - a), (c, d - c)) for a, b in spans[0] for c, d in spans[1]]
        if draw(2):
            i = draw(len(found))
            (a, n), other = found[i]
            found[i] = ((max(a - draw(2), 0), max(1, n + draw(3) - 1)), other)
        counts = torch.zeros(8, 8)
        for (a, n), (b, m) in found:
            counts[a : a + n, b : b + m] += 1
        right = bool((counts[:6, :5] == 1).all() and counts.sum() == 30)
        planned = [pieces_module.Planned(0, (6, 5), torch.float32, box) for box in found]
        assert (not list(pieces_module.cover_problems("x", planned))) == right
        verdicts.add(right)
    assert verdicts == {True, False}


def test_no_permission_ends_in_a_clear_error(tmp_path):
    """A file stands where the folder shall be: also for root, who may write everywhere."""
    (tmp_path / "run").write_text("")
    saver = Saver(tmp_path / "run", ONE, 2, 0)
    saver.save(3, [piece("a")], {})
    with pytest.raises(CheckpointError, match=r"^the checkpoint of step 3 was not saved: .* cannot be made: Not a dir"):
        saver.wait()


def test_full_disk_ends_in_a_clear_error(tmp_path):
    """A limit on the size of files acts as a disk that is full in the middle of one; the checkpoint before stays."""

    def body(place, device):
        import resource

        saver = Saver(tmp_path, Ranks(place.world, place.rank), 2, 0)
        mine = piece(f"a{place.rank}", (1000, 1000))
        saver.save(1, [mine], {})
        saver.wait()
        if place.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        saver.save(2, [mine], {})
        with pytest.raises(CheckpointError) as caught:
            saver.wait()
        return str(caught.value)

    for told in start(body, 2, LAUNCH, 60.0):
        assert told.startswith("the checkpoint of step 2 was not saved: ")
        assert "-00001-rest.safetensors cannot be written: " in told
        assert "File too large" in told and "Traceback" not in told
    assert complete(tmp_path) == [step_folder(tmp_path, 1)]
    assert read_index(step_folder(tmp_path, 1)).state == {}
