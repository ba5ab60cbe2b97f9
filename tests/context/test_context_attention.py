"""The `attend` seam alone, over ranks: output and gradients against a plain softmax of one device in float64."""

import itertools

import pytest
import torch

from research.config import CpConfig, LaunchConfig, RunConfig, TrainConfig
from research.launch.local import start
from research.mesh import Mesh
from research.models import seams
from research.models.batch import Batch
from research.parallel.cp import ContextParallel
from research.parallel.cp import attention as attending
from research.parallel.cp import plan as plans

METHODS = [("ring", 1), ("all_gather", 1), ("ulysses", 1), ("hybrid", 2)]
BALANCES = ["none", "zigzag", "striped"]
SAMPLES, SCALE = 2, 0.3


def inputs(sequence, heads, kv_heads, width, value_width, dtype=torch.float64, spread=1.0):
    """q, k, v, the gradient of the output, and documents, of whole samples; `spread` stretches the scores."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(heads, width), (kv_heads, width), (kv_heads, value_width), (heads, value_width)]
    tensors = [torch.randn(SAMPLES, sequence, *s, generator=generator, dtype=torch.float64) for s in shapes]
    tensors[0] *= spread
    begins = torch.rand(SAMPLES, sequence, generator=generator) < 0.1
    return [t.to(dtype) for t in tensors], begins.cumsum(1)


def reference(q, k, v, do, window=0, documents=None):
    """Softmax over the whole square, in float64."""
    q, k, v, do = (t.double() for t in (q, k, v, do))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    copies = q.shape[2] // k.shape[2]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(copies, 2)) * SCALE
    place = torch.arange(q.shape[1])
    distance = place[:, None] - place
    seen = (distance >= 0) & (distance < (window or len(place)))
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None])
    o = torch.einsum(
        "bhqk,bkhd->bqhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v.repeat_interleave(copies, 2)
    )
    o.backward(do)
    return [o.detach(), q.grad, k.grad, v.grad]


def on_ranks(cp, tensors, documents=None, window=0):
    """The same by the seam, each rank with the tokens that `cut_batch` gives it, put together by position."""
    config = RunConfig(cp=cp, train=TrainConfig(dtype="float64"))
    sequence = tensors[0].shape[1]
    places = torch.arange(sequence).expand(SAMPLES, sequence)
    whole = Batch(places, places, places, places if documents is None else documents)

    def body(place, device):
        mesh = Mesh({"cp": cp.degree}, place.rank)
        batch = ContextParallel().cut_batch(whole, config, mesh)
        attend = ContextParallel().seams(config, mesh, None).get("attend", seams.attend)
        mine = batch.positions[0]
        q, k, v, do = (t[:, mine].clone() for t in tensors)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        about = {} if documents is None else {"documents": batch.documents, "starts": batch.starts}
        o = attend(*leaves, batch.positions, scale=SCALE, window=window, **about)
        o.backward(do)
        return mine, [o.detach(), *(t.grad for t in leaves)]

    parts = start(body, cp.degree, LaunchConfig(threads=1), 60.0)
    order = torch.cat([mine for mine, _ in parts]).argsort()
    return [torch.cat([part[i] for _, part in parts], 1)[:, order] for i in range(4)]


def worst(got, want):
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True))


SHAPES = [(8, 8, 4, 4), (8, 2, 4, 4), (8, 1, 4, 6), (4, 4, 6, 3)]  # MHA, GQA, MQA with wide values, MLA's narrow ones
CASES = [
    (degree, method, ulysses, balance)
    for degree, (method, ulysses), balance in itertools.product([2, 3, 4], METHODS, BALANCES)
    if degree % ulysses == 0 and (method, degree) != ("ulysses", 3)
]


@pytest.mark.parametrize("degree, method, ulysses, balance", CASES)
def test_equals_plain_softmax(degree, method, ulysses, balance):
    """One shape and mask for each case, in turn: all meet all balances and methods (`-m slow`: all with all)."""
    number = CASES.index((degree, method, ulysses, balance))
    check(
        CpConfig(degree, method, balance, ulysses), SHAPES[number % 4], window=[0, 7, 30][number % 3], packed=number % 2
    )


@pytest.mark.slow
@pytest.mark.parametrize("window, packed", [(0, False), (0, True), (1, False), (7, True), (30, False)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "degree, method, ulysses, balance", [*CASES, (8, "ring", 1, "zigzag"), (8, "hybrid", 4, "striped")]
)
def test_all_with_all(degree, method, ulysses, balance, shape, window, packed):
    if method in ("ulysses", "hybrid") and shape[0] % max(ulysses, degree if method == "ulysses" else 1):
        pytest.skip("heads do not divide")
    check(CpConfig(degree, method, balance, ulysses), shape, window, packed)


def check(cp, shape, window, packed):
    tensors, documents = inputs(48, *shape)
    documents = documents if packed else None
    got = on_ranks(cp, tensors, documents, window)
    assert worst(got, reference(*tensors, window, documents)) < 1e-12


def test_kv_heads_that_do_not_divide_by_ulysses():
    """12 query heads, 6 kv heads, 4 ranks: query heads 3 to 5 read kv heads 1 and 2."""
    tensors, _ = inputs(32, 12, 6, 4, 4)
    assert worst(on_ranks(CpConfig(4, "ulysses", "none"), tensors), reference(*tensors)) < 1e-12


def test_planted_key_positions_off_by_one(monkeypatch):
    """Every rank takes the keys of others to stand one place earlier than they do."""
    real = plans.Run.before
    monkeypatch.setattr(plans.Run, "before", lambda run, places: real(run._replace(start=run.start - 1), places))
    plans._plan_of_whole_samples.cache_clear()
    tensors, _ = inputs(32, 4, 2, 4, 4)
    assert not worst(on_ranks(CpConfig(2, "ring", "striped"), tensors), reference(*tensors)) < 1e-3
    plans._plan_of_whole_samples.cache_clear()


def test_planted_merge_without_the_max(monkeypatch):
    """Right as long as no exponential overflows, which float32 allows up to 88."""

    def naive(o, lse, part, part_lse):
        here, there = lse.exp(), part_lse.exp()
        o.copy_((o * here[..., None] + part * there[..., None]) / (here + there)[..., None])
        lse.copy_((here + there).log())

    cp = CpConfig(2, "ring", "zigzag")
    near, _ = inputs(32, 4, 2, 4, 4, torch.float32)
    far, _ = inputs(32, 4, 2, 4, 4, torch.float32, spread=300.0)
    assert worst(on_ranks(cp, far), reference(*far)) < 1e-4
    monkeypatch.setattr(attending, "merge", naive)
    assert worst(on_ranks(cp, near), reference(*near)) < 1e-4
    assert not worst(on_ranks(cp, far), reference(*far)) < 1e-4


@pytest.mark.parametrize("method, balance", [("ring", "zigzag"), ("ring", "none"), ("all_gather", "striped")])
def test_bfloat16_is_as_exact_on_8_ranks(method, balance):
    """Parts are merged, and gradients summed over ranks, in float32. Heads with scores far apart as well: no NaN."""
    for spread in (1.0, 30.0):
        tensors, _ = inputs(256, 4, 2, 16, 16, torch.bfloat16, spread)
        want = reference(*tensors)
        one, eight = (on_ranks(CpConfig(n, method, balance), tensors) for n in (1, 8))
        for a, b, exact in zip(one, eight, want, strict=True):
            assert worst([b], [exact]) <= 1.5 * worst([a], [exact])
