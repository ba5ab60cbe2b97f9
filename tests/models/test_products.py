"""Products by oneDNN against torch's own, and against float64."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from research.models import products
from research.models.flops import counter
from research.models.products import Products, add_linear, linear, weight_gradient

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="a torch without oneDNN")


class Called(TorchDispatchMode):
    """How often oneDNN's product was called."""

    def __init__(self):
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += func is products.ONEDNN.default
        return func(*args, **(kwargs or {}))


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


def values(x, w, dy):
    """The product and its gradients, by whatever is on."""
    x, w = (t.detach().requires_grad_() for t in (x, w))
    y = Products().linear(x, w)
    y.backward(dy)
    return y.detach(), x.grad, w.grad


@pytest.mark.parametrize("shape", [(4, 128, 64, 48), (1, 512, 32, 129), (2, 300, 257, 33)])
def test_products_and_gradients_are_those_of_torch(monkeypatch, shape):
    """To 1e-6 of float64, as torch's; and it is oneDNN that computes them."""
    b, s, i, o = shape
    x, w, dy = random(b, s, i), random(o, i, seed=1), random(b, s, o, seed=2)
    with Called() as called:
        ours = values(x, w, dy)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    with Called() as off:
        theirs = values(x, w, dy)
    wide = values(x.double(), w.double(), dy.double())
    assert (called.n, off.n) == (3, 0)
    for mine, plain, exact in zip(ours, theirs, wide, strict=True):
        assert error(mine, exact) < 1e-6 > error(plain, exact)


def test_views_and_sums():
    """Pieces of tokens, transposed and padded weights, and a sum in place."""
    x, w, y = random(4, 512, 96)[:, 100:356], random(64, 200, seed=1).T[:96].T, random(4, 256, 64, seed=2)
    want = x.double() @ w.double().T
    dw = weight_gradient(y, x)
    assert error(linear(x, w), want) < 1e-6
    assert error(dw, y.double().flatten(0, 1).T @ x.double().flatten(0, 1)) < 1e-6
    want += y.double()
    add_linear(y, x, w)
    assert error(y, want) < 1e-6


@pytest.mark.parametrize("shape, dtype", [((0, 64), "float32"), ((4, 64), "float32"), ((512, 64), "float64"),
                                          ((512, 64), "bfloat16")])  # fmt: skip
def test_what_torch_computes_as_before(shape, dtype):
    """No rows, few of them, other dtypes."""
    x, w = random(*shape).to(getattr(torch, dtype)), random(96, 64, seed=1).to(getattr(torch, dtype))
    with Called() as called:
        y = linear(x, w)
    assert called.n == 0 and torch.equal(y, torch.nn.functional.linear(x, w))


LOADS = [[300, 0, 37, 200], [0, 0, 512, 0], [32, 480, 0, 0], [1, 1, 100, 435], [128, 129, 127, 128]]


def grouped_errors(counts, inner, outer):
    """Of each expert's product and of its gradients, against float64."""
    rows, w, dy = (
        random(sum(counts), inner),
        random(len(counts), outer, inner, seed=1),
        random(sum(counts), outer, seed=2),
    )
    sides = []
    for dtype in (torch.float32, torch.float64):
        leaves = [t.to(dtype).detach().requires_grad_() for t in (rows, w)]
        y = Products().grouped(*leaves, torch.tensor(counts))
        y.backward(dy.to(dtype))
        sides.append([y.detach(), *(leaf.grad for leaf in leaves)])
    idle = [e for e, n in enumerate(counts) if n == 0]
    assert not sides[0][2][idle].any()
    return [error(*pair) for pair in zip(*sides, strict=True)]


@pytest.mark.parametrize("counts", LOADS, ids=str)
@pytest.mark.parametrize("inner, outer", [(128, 192), (192, 128)])
def test_experts_take_rows_of_their_neighbours_along(counts, inner, outer):
    with Called() as called:
        assert max(grouped_errors(counts, inner, outer)) < 1e-6
    assert called.n >= 3


@pytest.mark.parametrize("counts", LOADS, ids=str)
def test_experts_of_few_rows_take_the_one_kernel(counts):
    with Called() as called:
        assert max(grouped_errors(counts, 96, 128)) < 1e-6
    assert called.n == 0


def test_planted_gradient_of_the_neighbours_rows(monkeypatch):
    monkeypatch.setattr(products, "_alone", lambda window, own: window.T)
    assert grouped_errors(LOADS[0], 128, 192)[2] > 0.1


def test_few_kernels_are_compiled_whatever_the_loads():
    def size(n, *others):
        return [at.stop - at.start for at, _ in products._windows([n, *others])[:1]]

    sizes = {n: size(n, 5000, 5000)[0] for n in range(1, 2**12)}
    assert [len({sizes[n] for n in range(1, 2**bits)}) for bits in (10, 11, 12)] == [24, 32, 40]
    assert all(n <= sizes[n] < max(n + 32, 1.125 * n) for n in sizes)
    capped = {k for n in range(1, 2**12) for others in (0, 3, 40) for k in size(n, others)}
    assert capped <= set(sizes.values())


@pytest.mark.parametrize("counts", [[500], [500, 3]], ids=str)
def test_without_neighbours_an_expert_takes_torch_s_products(counts):
    with Called() as called:
        assert max(grouped_errors(counts, 96, 128)) < 1e-6
    assert called.n == 0


def test_products_are_counted():
    x, w = random(512, 64), random(96, 64, seed=1)
    assert products._by_onednn(x, w)
    with counter() as counted:
        linear(x, w)
    assert counted.get_total_flops() == 2 * 512 * 64 * 96
