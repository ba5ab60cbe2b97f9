"""Context parallelism against one process, by every gradient in float64. Planted faults: `tests/context`."""

import itertools

import pytest

from tests.parity.findings import assert_equal

MLA = "model.attention=mla model.rotary_dim=4 model.value_dim=12"
DOCUMENTS = "model.document_mask=true data.path=experiments/configs"
METHODS = ["ring", "all_gather", "ulysses", "hybrid cp.ulysses=2"]
GRID = [
    "cp.degree=3 cp.method=ulysses data.sequence=63 model.heads=6 model.kv_heads=2",  # odd, and no ring to balance
    "cp.degree=2",
    "cp.degree=4 cp.balance=none",
    "cp.degree=3 data.sequence=66 model.window=20",
    "cp.degree=4 cp.balance=striped train.recompute=full",
    "cp.degree=8 cp.method=hybrid cp.ulysses=2",  # two copies of a kv head in each inner group
    "cp.degree=4 cp.method=ulysses model.kv_heads=1",
    "cp.degree=4 cp.method=all_gather cp.balance=striped",
    f"cp.degree=4 {DOCUMENTS} model.window=20",
    f"cp.degree=4 cp.balance=none cp.method=all_gather {DOCUMENTS}",
    f"cp.degree=4 cp.balance=striped cp.method=hybrid cp.ulysses=2 {DOCUMENTS} model.window=9",
    f"cp.degree=2 cp.method=ulysses {DOCUMENTS}",
    f"cp.degree=2 {MLA} model.q_latent=24 train.recompute=full",
    f"cp.degree=4 cp.method=hybrid cp.ulysses=2 cp.balance=striped {MLA} model.window=11",
    "cp.degree=2 tp.degree=2",
    "cp.degree=2 tp.degree=4 tp.sequence=false cp.method=ulysses",
    "cp.degree=4 tp.degree=2 cp.method=hybrid cp.ulysses=2 tp.sequence=false",
    "cp.degree=2 dp.degree=2 model.balance_scope=sequence cp.balance=striped",
    "cp.degree=2 dp.degree=3 model.mtp_depth=2 model.layers=2 cp.balance=none",
    "cp.degree=2 ep.degree=2",
    "cp.degree=2 tp.degree=2 ep.degree=4 tp.sequence=false cp.balance=striped model.balance_scope=sequence",
    "cp.degree=2 dp.degree=2 dp.zero=3 ep.degree=2 cp.method=ulysses model.window=20",
    "cp.degree=2 tp.degree=2 dp.degree=2 model.capacity=0.7 model.drop_by=score model.bias_rate=0.05",
]


@pytest.mark.parametrize("words", GRID)
def test_layout_equals_one_process(prove, words):
    assert_equal(prove(*words.split()))


@pytest.mark.slow
@pytest.mark.parametrize("tp", ["", "tp.degree=2"])
@pytest.mark.parametrize(
    "degree, method, balance", list(itertools.product([2, 4, 8], METHODS, ["none", "zigzag", "striped"]))
)
def test_every_method_and_balance(prove, degree, method, balance, tp):
    if degree * bool(tp) == 8:
        pytest.skip("16 ranks")
    words = f"cp.degree={degree} cp.method={method} cp.balance={balance} {tp} train.steps=2 train.warmup_steps=1"
    assert_equal(prove(*words.split(), *(["model.heads=16", "model.kv_heads=4"] if tp else [])))
