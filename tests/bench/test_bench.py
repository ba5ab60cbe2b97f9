"""Side by side: equal before timed, ratios by hand, CPU time of children, and the command."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from functools import partial

import pytest
import torch

from experiments import bench
from research.bench import (
    context,
    data,
    expert,
    registry,
    side_by_side,
    stages,
    tensor,
    torch_context,
    torch_expert,
    workload,
)
from research.bench.side_by_side import Case, NotEqualError, Side, compare, cpu_s, gate
from research.bench.torch_tensor import TorchTraining
from research.config import LaunchConfig, replace
from research.launch.local import RankError
from research.models import products
from research.train.storage import Storage

ONE = torch.ones(3)


def busy(seconds, values=None):
    def run():
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass
        return {"y": ONE} if values is None else values

    return run


def case(*others, ours=None, tolerance=1e-6):
    sides = [Side(f"other {i}", run) for i, run in enumerate(others)]
    return Case("a case", 1, tolerance, Side("ours", ours or busy(0)), sides)


def test_ratio_of_each_side():
    steps = []
    results = compare(case(busy(0.02), busy(0.005), ours=busy(0.01)), 7, lambda: steps.append(1))
    assert [r.other for r in results] == ["other 0", "other 1"] and len(steps) == 7
    assert [r.cpu_ratio.median for r in results] == pytest.approx([0.5, 2.0], rel=0.2)
    assert results[0].ours_cpu_ms == pytest.approx(10, rel=0.2) and results[0].repetitions == 7
    assert all(r.cpu_ratio.low <= r.cpu_ratio.median <= r.cpu_ratio.high for r in results)


def test_ratio_by_hand(monkeypatch):
    """Paired: 1/2, 4/2, 3/6 have the median 1/2, which the ratio of medians, 3/2, is not."""
    taken = iter([2.0, 1.0, 4.0, 2.0, 6.0, 3.0])  # the order reverses each time
    monkeypatch.setattr(side_by_side, "_timed", lambda run: (t := next(taken), t))
    (result,) = compare(case(busy(0)), 3)
    assert (result.cpu_ratio.low, result.cpu_ratio.median, result.cpu_ratio.high) == (0.5, 0.5, 1.25)
    assert (result.ours_cpu_ms, result.other_cpu_ms) == (3000.0, 2000.0)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"y": ONE * 1.1}, "a case: y of ours and other 0 differ by 9.1e-02, tolerance 1e-06: their times say nothing"),
        ({"y": ONE * torch.nan}, "y of ours and other 0 differ by nan"),
        ({"y": ONE, "z": ONE}, "ours and other 0 do not both have z"),
    ],
)
def test_nothing_unequal_is_timed(monkeypatch, values, message):
    monkeypatch.setattr(side_by_side, "_timed", lambda run: pytest.fail("timed"))
    with pytest.raises(NotEqualError) as caught:
        compare(case(busy(0, values)), 3)
    assert message in str(caught.value)


def test_cpu_time_of_children_counts():
    before = cpu_s()
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert cpu_s() - before >= 0.25


def test_layers_are_equal(monkeypatch):
    """The gate of the real cases, on fewer tokens; and a planted fault in a weight."""
    layer = pytest.importorskip("research.bench.layer")
    monkeypatch.setattr(layer, "LENGTH", 32)
    dense, moe = list(layer.cases())[:2]
    for one in (dense, moe):
        assert max(gate(one)) < layer.TOLERANCE
    other, config = layer._llama()
    ours, theirs = layer.pair(layer.DENSE, "transformers", other, config)
    with torch.no_grad():
        other.mlp.up_proj.weight[0] *= 1.01
    with pytest.raises(NotEqualError):
        gate(Case("planted", 1, layer.TOLERANCE, ours, [theirs]))


def test_a_side_by_torch_takes_torch_s_products():
    asked = []
    ours = Side("ours", lambda: asked.append(products._by_onednn(x, x)) or {})
    x, has_onednn = torch.zeros(1024, 1024), torch.backends.mkldnn.is_available()
    plain = side_by_side.by_torch(ours)
    ours.run(), plain.run(), ours.run()
    assert asked == [has_onednn, False, has_onednn] and plain.name == "ours, torch's products"
    of_ranks = side_by_side.RankedSide("ours", lambda place, device: ours.run).by_torch()
    of_ranks.make(None, None)()
    assert asked[3:] == [False] and of_ranks.name == plain.name


def ranked(*others, ours=0.03):
    """Sides of two ranks that are busy for so many seconds each."""

    def side(name, seconds, values=None):
        return side_by_side.RankedSide(name, lambda place, device: busy(seconds[place.rank], values))

    sides = [side(f"other {i}", *other) for i, other in enumerate(others)]
    return side_by_side.RankedCase("ranks", 2, LaunchConfig(), 1e-6, side("ours", [ours] * 2), sides)


def test_cpu_time_of_ranks_adds_up():
    """Two ranks: 30 + 30 ms over 20 + 40 ms."""
    steps = []
    (result,) = compare(ranked([[0.02, 0.04]]), 5, lambda: steps.append(1))
    assert result.cpu_ratio.median == pytest.approx(1, rel=0.2) and result.ours_cpu_ms == pytest.approx(60, rel=0.2)
    assert (result.case, result.threads, result.repetitions, len(steps)) == ("ranks", 2, 5, 5)


def test_sides_of_ranks_share_nothing_and_take_turns(tmp_path):
    """Each in processes of its own, one at work at a time, in an order that reverses."""

    def make(name, place, device):
        place.rank or (tmp_path / name).write_text(str(os.getpid()))

        def run():
            with (tmp_path / "log").open("a") as log:
                time.sleep(0.02)
                log.write(f"{name}{place.rank} ")
            return {"y": ONE}

        return run

    ours, *others = (side_by_side.RankedSide(name, partial(make, name)) for name in "abc")
    compare(side_by_side.RankedCase("ranks", 2, LaunchConfig(), 0.0, ours, others), 2)
    words = (tmp_path / "log").read_text().split()[6:]  # after the first run of each
    assert [sorted(words[i : i + 2]) for i in range(0, 12, 2)] == [[f"{name}0", f"{name}1"] for name in "cbaabc"]
    assert len({(tmp_path / name).read_text() for name in "abc"}) == 3


def test_no_times_of_ranks_that_differ():
    off = {"y": ONE * 1.1}
    with pytest.raises(NotEqualError, match=r"ranks: y of ours and other 1 differ by 9.1e-02, tolerance"):
        compare(ranked([[0.0, 0.0]], [[0.0, 0.0], off]), 2)


def test_a_rank_that_fails_ends_all_sides():
    def make(place, device):
        if place.rank == 1:
            raise OSError("no room")
        return busy(0)

    broken = dataclasses.replace(ranked(), others=[side_by_side.RankedSide("broken", make)])
    with pytest.raises(RankError, match=r"(?s)rank 1 failed first.*no room"):
        compare(broken, 2)


@pytest.mark.parametrize("sequence", [0, 1])
def test_tensor_parallel_steps_are_equal(monkeypatch, sequence):
    """The gate of the real cases, on a smaller model; and a planted fault in what the second step starts from."""
    monkeypatch.setattr(workload, "LENGTH", 16)
    monkeypatch.setattr(workload, "MODEL", {**workload.MODEL, "dim": 64, "layers": 2, "head_dim": 8, "vocab": 256})
    case = list(tensor.cases())[sequence]
    assert [r.error < workload.TOLERANCE for r in compare(case, 2)] == [True, True]
    monkeypatch.setitem(workload.TRAIN, "lr", 1.1e-3)
    planted, given = list(tensor.cases())[sequence], case.others[0].make.args[0]
    monkeypatch.setattr(tensor, "TorchTraining", lambda config, *rest: TorchTraining(given, *rest))
    with pytest.raises(NotEqualError, match="losses of quintet and torch parallelize_module differ by"):
        compare(planted, 2)


@pytest.mark.parametrize("zero, peer", [(0, "DistributedDataParallel"), (3, "fully_shard")])
def test_data_parallel_steps_are_equal(monkeypatch, zero, peer):
    """The gate of the real cases, on a smaller model; and a planted fault in what the second step starts from."""
    monkeypatch.setattr(workload, "LENGTH", 16)
    monkeypatch.setattr(workload, "MODEL", {**workload.MODEL, "dim": 64, "layers": 2, "head_dim": 8, "vocab": 256})
    two, four = data.cases(zero, peer)
    assert [r.error < workload.TOLERANCE for r in compare(two, 2)] == [True] * 3 and four.ranks == 4
    real = data.TorchTraining
    faster = replace(two.others[0].make.args[0], {"train.lr": 1.1e-3})
    monkeypatch.setattr(data, "TorchTraining", lambda config, *rest: real(faster, *rest))
    with pytest.raises(NotEqualError, match=f"losses of quintet and torch {peer} differ by"):
        compare(two, 2)


def test_context_parallel_steps_are_equal(monkeypatch):
    """The gate of the real case, on a smaller model; and a planted fault in the keys that torch's ring is given."""
    monkeypatch.setattr(workload, "LENGTH", 16)
    monkeypatch.setattr(workload, "MODEL", {**workload.MODEL, "dim": 64, "layers": 2, "head_dim": 8, "vocab": 256})
    (case,) = context.cases()
    assert [r.error < workload.TOLERANCE for r in compare(case, 2)] == [True] * 3
    monkeypatch.setattr(torch_context, "ring", lambda q, k, v, real=torch_context.ring: real(q, k.roll(1, 2), v))
    with pytest.raises(NotEqualError, match="losses of quintet and torch's ring attention, DDP differ by"):
        compare(case, 2)


def test_pipelined_steps_are_equal(monkeypatch):
    """The gate of the real cases, on a smaller model; and planted faults: in what the second step starts from, and the
    weight gradients that were put off dropped."""
    monkeypatch.setattr(workload, "LENGTH", 16)
    monkeypatch.setattr(workload, "MODEL", {**workload.MODEL, "dim": 64, "layers": 2, "head_dim": 8, "vocab": 256})
    plain, cut, *split = stages.cases()
    assert [r.error < workload.TOLERANCE for one in (plain, cut, *split) for r in compare(one, 2)] == [True] * 6
    real, faster = stages.TorchPipeline, replace(plain.others[0].make.args[0], {"train.lr": 1.1e-3})
    monkeypatch.setattr(stages, "TorchPipeline", lambda config, *rest: real(faster, *rest))
    with pytest.raises(NotEqualError, match="losses of quintet and torch pipelining differ by"):
        compare(plain, 2)
    monkeypatch.setattr(Storage, "accumulate", lambda *args: None)
    with pytest.raises(NotEqualError, match="losses of quintet zb_h1 and quintet 1f1b differ by"):
        compare(split[0], 2)


def test_expert_parallel_steps_are_equal(monkeypatch):
    """The gate of the real cases, on a smaller model; and a planted fault that the losses of AdamW do not show:
    gradients of experts as they come, a sum over ranks whose losses are means."""
    monkeypatch.setattr(workload, "LENGTH", 16)
    monkeypatch.setattr(workload, "MODEL", {**workload.MODEL, "dim": 64, "layers": 2, "head_dim": 8, "vocab": 256})
    monkeypatch.setattr(expert, "EXPERTS", ((4, 32, 2), (8, 16, 4)))
    few, many = expert.cases()
    for case in (few, many):
        assert [r.error < workload.TOLERANCE for r in compare(case, 2)] == [True, True]
    monkeypatch.setattr(torch_expert.TorchExpertTraining, "share", lambda self: None)
    with pytest.raises(NotEqualError, match="norm of quintet and torch all_to_all_single, loop differ by"):
        compare(few, 2)


def test_the_command(monkeypatch, tmp_path, capsys):
    def waits():
        """Waits."""
        yield case(busy(0.002))

    monkeypatch.setattr(bench, "BENCHES", {"waits": waits})
    monkeypatch.setattr(bench, "FOLDER", tmp_path)
    assert bench.main(["waits", "repetitions=3"]) == 0
    assert "| a case | 1         | other 0 |" in capsys.readouterr().out
    content = json.loads((tmp_path / "bench" / "waits.json").read_text())
    assert content["bench"] == "waits" and content["rows"][0]["repetitions"] == 3
    assert "# Bench: waits" in (tmp_path / "bench" / "waits.md").read_text()
    assert bench.main(["--help"]) == 0 and "waits: Waits." in capsys.readouterr().out


@pytest.mark.parametrize("word", ["lyer", "repetitions=1", "repetitions=x"])
def test_bad_words(word, capsys):
    assert bench.main([word]) == 1
    legal = ", ".join(registry.BENCHES)
    assert f"{word} is no bench; legal: {legal}, and repetitions=N" in capsys.readouterr().err


def test_a_missing_peer_is_told(monkeypatch, capsys):
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None)
    assert bench.main(["layer"]) == 1
    assert "compares with transformers, which is not installed: pip install" in capsys.readouterr().err
