"""Loads that are given, not routed: each expert's share of the tokens, whatever their numbers begin with."""

import pytest
import torch

from research.config import ModelConfig
from research.models.moe import forced


@pytest.mark.parametrize("first", [0, 10**9])
@pytest.mark.parametrize("experts, top_k", [(8, 2), (8, 1), (64, 6), (4, 3), (4, 4), (1, 1)])
@pytest.mark.parametrize("load", ["even", "skewed", "worst"])
def test_shares(load, experts, top_k, first):
    ids = forced(first + torch.arange(1000), ModelConfig(experts=experts, top_k=top_k, load=load))
    assert ids.shape == (1000, top_k) and all(len(set(row)) == top_k for row in ids.tolist())
    got = torch.bincount(ids.flatten(), minlength=experts) / 1000
    mean = top_k / experts
    if load == "even":
        want = torch.full((experts,), mean)
    elif load == "worst":
        want = torch.tensor([1.0] * top_k + [0.0] * (experts - top_k))
    else:
        most = min(2 * mean, 1.0)
        want = torch.linspace(most, 2 * mean - most, experts) if experts > 1 else torch.ones(1)
    assert (got - want).abs().max() < 0.02
