"""Initial values depend on seed, name and position only."""

import torch

from research.build import build, normal
from research.config import RunConfig, replace
from research.mesh import Mesh

CPU = torch.device("cpu")


def test_a_box_equals_the_slice_of_the_whole():
    shape = (7, 6, 5)
    whole = normal(3, "w", shape, ((0, 7), (0, 6), (0, 5)), CPU)
    assert torch.equal(normal(3, "w", shape, ((2, 3), (0, 6), (1, 4)), CPU), whole[2:5, :, 1:5])
    assert torch.equal(normal(3, "w", shape, ((6, 1), (5, 1), (4, 1)), CPU), whole[6:, 5:, 4:])


def test_values_are_normal_and_independent():
    n = 1_000_000
    x = normal(0, "w", (n,), ((0, n),), CPU)
    assert abs(x.mean()) < 5 / n**0.5 and abs(x.var() - 1) < 10 / n**0.5
    assert abs((x**4).mean() - 3) < 0.05 and abs((x[1:] * x[:-1]).mean()) < 5 / n**0.5
    for other in (normal(1, "w", (n,), ((0, n),), CPU), normal(0, "v", (n,), ((0, n),), CPU)):
        assert abs((x * other).mean()) < 5 / n**0.5


def test_layers_differ_and_names_decide():
    built = build(RunConfig(), Mesh({}), CPU)
    layers = [built.model.layers[str(i)].attention.wq for i in range(4)]
    assert all(not torch.equal(a, b) for i, a in enumerate(layers) for b in layers[:i])
    assert all(0.8 < w.detach().std() / 0.02 < 1.2 for w in layers)
    again = build(replace(RunConfig(), {"model.layers": 2}), Mesh({}), CPU)
    assert torch.equal(again.model.layers["1"].attention.wq, layers[1])


def test_large_parameters_are_made_in_parts(monkeypatch):
    """The bound on scratch memory does not show in the values."""
    config = replace(RunConfig(), {"model.vocab": 70000})
    parts = build(config, Mesh({}), CPU).model.embedding
    assert parts.numel() > 2**22
    assert torch.equal(parts, (normal(0, "embedding", (70000, 64), ((0, 70000), (0, 64)), CPU) * 0.02).float())


def test_nothing_is_left_uninitialised():
    """Fresh memory is filled with NaN here, so a value that nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    try:
        built = build(RunConfig(), Mesh({}), CPU)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(p.isfinite().all() for p in built.model.parameters())
    assert not list(built.model.buffers())
