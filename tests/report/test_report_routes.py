"""Who sends to whom, as told by one process, is what ranks send."""

from functools import partial

import pytest
import torch

from experiments.command import CHECKS
from research import settings
from research.build import build
from research.launch.local import start
from research.mesh import Mesh, total_ranks
from research.parallel.axis import cut_batch
from research.report.bars import heat
from research.report.routes import choices, rows_sent
from research.report.trace import first_microbatch

LAYOUTS = [
    ["dp.degree=4", "ep.degree=4"],
    ["dp.degree=4", "ep.degree=2"],
    ["dp.degree=2", "tp.degree=2", "ep.degree=2", "ep.tensor=2"],
]


@pytest.fixture
def load(text, tmp_path):
    model = ["model.layers=2", f"data.path={text}", f"data.cache={tmp_path}/cache"]
    return lambda *words: settings.load("experiments/configs/tiny.yaml", [*model, *words], CHECKS)


def dispatched(config, batch, place, device):
    """Bytes that this rank receives for the experts of the one MoE layer."""
    mesh = Mesh.from_config(config, place.world, place.rank)
    with torch.no_grad():
        build(config, mesh, device).model(cut_batch(batch, config, mesh))
    return sum(n for label, n in mesh.ledger.bytes.items() if label.purpose == "dispatch")


@pytest.mark.parametrize("words", LAYOUTS, ids=" ".join)
def test_ranks_receive_what_the_map_says(load, words):
    one, layout = load(), load(*words)
    batch = first_microbatch(one)
    sent = rows_sent(layout, choices(one, batch, layer=1), batch)
    assert sent.to_numpy().sum() == batch.tokens.numel() * layout.model.top_k * layout.ep.tensor
    received = start(partial(dispatched, layout, batch), total_ranks(layout), layout.launch, 60.0)
    for rank, nbytes in enumerate(received):
        assert nbytes == (sent[rank].sum() - sent.loc[rank, rank]) * (layout.model.dim + 1) * 8


def test_a_dense_layer_has_no_choices(load):
    with pytest.raises(AssertionError, match="layer 0 has no experts"):
        choices(load(), first_microbatch(load()), layer=0)
    with pytest.raises(AssertionError, match="one process sees"):
        choices(load("dp.degree=2"), first_microbatch(load()), layer=1)


def test_a_heat_map_writes_every_number(load):
    one, layout = load(), load(*LAYOUTS[0])
    batch = first_microbatch(one)
    sent = rows_sent(layout, choices(one, batch, layer=1), batch)
    axes = heat(sent, "rows").axes[0]
    assert [t.get_text() for t in axes.texts] == [str(n) for n in sent.to_numpy().ravel()]
    assert axes.get_xlabel() == "to rank" and axes.get_ylabel() == "from rank"
