"""What is chosen from logits, and that it depends on seed, text and position alone."""

import pytest
import torch

from research.build import build
from research.generate.decode import Generation
from research.generate.sample import choose, draw
from research.mesh import Mesh
from tests.generate.forced import config_of

N = 20_000


def frequencies(logits, temperature, top_p):
    draws = (torch.arange(N, dtype=torch.float64) + 0.5) / N
    ids = choose(logits.expand(N, -1), temperature, top_p, draws)
    return torch.bincount(ids, minlength=logits.shape[-1]) / N


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.8, 1.0])
def test_the_likeliest_that_add_up_to_top_p(temperature, top_p, dtype):
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    p = (logits.double() / temperature).softmax(-1)
    want, held = torch.zeros_like(p), 0.0
    for i in p.argsort(descending=True, stable=True).tolist():
        if held < top_p:
            want[i], held = p[i], held + float(p[i])
    assert (frequencies(logits, temperature, top_p) - want / want.sum()).abs().max() < 2e-4


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1.0])
def test_of_equals_the_first(temperature):
    logits = torch.tensor([[0.0, 700.0, 700.0, -1e30]])
    assert choose(logits, temperature, 1e-9, torch.tensor([0.999]).double()).tolist() == [1]


def test_the_ends_of_draws():
    logits = torch.zeros(2, 5)
    assert choose(logits, 1.0, 1.0, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)).tolist() == [0, 4]
    assert choose(torch.zeros(0, 5), 1.0, 1.0, torch.zeros(0).double()).tolist() == []


def test_draws_are_uniform_and_know_their_place():
    found = torch.tensor([draw(s, t, p) for s in range(20) for t in range(20) for p in range(20)], dtype=torch.float64)
    assert len(found.unique()) == len(found) and found.min() >= 0 and found.max() < 1
    assert (found.sort().values - (torch.arange(8000) + 0.5) / 8000).abs().max() < 0.02
    assert draw(1, 23, 4) != draw(12, 3, 4) != draw(1, 2, 34)


@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_finite_end_the_run(temperature):
    class Broken(Generation):
        def chosen(self, logits):
            return super().chosen(logits.index_fill(1, torch.tensor([3]), torch.nan))

    config = config_of("model.layers=1", f"generate.temperature={temperature}")
    made = Broken(build(config, Mesh({}), torch.device("cpu")), config, [[1], [2, 3]], lambda made: "", 250)
    with pytest.raises(FloatingPointError, match="logits after token 1 of text 0 are not finite"):
        list(made.run())
