"""What fills up a vocabulary that ranks do not divide is never predicted."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from research.config import LaunchConfig
from research.launch.local import start
from research.mesh import Mesh
from research.parallel import tp


def logits(vocab, sequence, place, device):
    """(3, V) of three tokens of two texts, by two ranks with three rows of the head each, the last of which is padding:
    its logits of 0 would be the largest. And what they should be."""
    generator = torch.Generator().manual_seed(0)
    x, head = torch.rand(2, 4, 8, generator=generator), -torch.rand(5, 8, generator=generator)
    here = x.chunk(2, 1)[place.rank] if sequence else x
    mine, rows = F.pad(head, (0, 0, 0, 1)).chunk(2)[place.rank], torch.tensor([7, 2, 4])
    group = Mesh({"tp": 2}, place.rank).group("tp")
    return tp.logits(group, vocab, sequence)(here, mine, rows), x.flatten(0, 1)[rows] @ head.T


def of_ranks(vocab, sequence):
    return start(partial(logits, vocab, sequence), 2, LaunchConfig(threads=1), 60.0)


@pytest.mark.parametrize("sequence", [True, False])
def test_padding_is_never_predicted(sequence):
    for found, want in of_ranks(5, sequence):
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize("sequence", [True, False])
def test_planted_padding_that_stays(sequence):
    for found, _ in of_ranks(6, sequence):
        assert found.argmax(-1).tolist() == [5] * 3
