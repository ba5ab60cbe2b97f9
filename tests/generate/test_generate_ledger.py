"""What generation receives along tp, in closed form: only the tokens that are asked for reach the logits."""

from collections import defaultdict
from fractions import Fraction

import pytest

from research.launch.local import start
from research.mesh import Mesh
from tests.generate.forced import LENGTHS, LIMIT_S, MADE, VOCAB, Forced, config_of, texts


def received(config):
    def run(place, device):
        mesh = Mesh.from_config(config, place.world, place.rank)
        list(Forced(config, mesh, texts()).run())
        assert not mesh.ledger.settle()  # nobody reads how long it waited, so nothing is kept for that
        return dict(mesh.ledger.bytes)

    ranks = start(run, 2, config.launch, LIMIT_S)
    assert ranks[0] == ranks[1]
    return {f"{label.axis}/{label.purpose}/{label.op}": n for label, n in ranks[0].items() if label.phase == "generate"}


@pytest.mark.parametrize("sequence", [True, False])
def test_bytes_along_tp(sequence):
    """4 layers of 2 pairs of column and row each: attention, and a feed-forward or a shared expert; 3 are MoE."""
    config, half, want = config_of("tp.degree=2", f"tp.sequence={sequence}".lower()), Fraction(1, 2), defaultdict(int)
    for tokens in [sum(LENGTHS), *[len(LENGTHS)] * (MADE - 1)]:
        stream = half * (tokens + tokens % 2) * config.model.dim * 8
        asked = half * len(LENGTHS) * config.model.dim * 8
        if sequence:
            want["tp/column/all_gather"] += 8 * stream
            want["tp/row/reduce_scatter"] += 8 * stream
            want["tp/lookup/reduce_scatter"] += stream
            want["tp/logits/all_reduce"] += 2 * asked
        else:
            want["tp/row/all_reduce"] += 8 * 2 * stream
            want["tp/lookup/all_reduce"] += 2 * stream
            want["tp/experts/all_gather"] += 3 * stream
        want["tp/logits/all_gather"] += half * len(LENGTHS) * VOCAB * 8
        want["world/next tokens/all_reduce"] += 2 * half * len(LENGTHS) * 8
    assert received(config) == want
