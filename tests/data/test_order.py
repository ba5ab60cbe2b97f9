"""Order of samples: permutations that are computed, mixtures that are exact, both directly at any step."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from research.data.order import Mixture, hashed, shuffled


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 100, 1023, 1024, 1025])
def test_every_epoch_is_another_permutation(size: int) -> None:
    """Also where numbers come in one by one, out of order, and from several epochs at once."""
    whole = shuffled(np.arange(5 * size), size, seed=3, source=0)
    epochs = whole.reshape(5, size)
    assert (np.sort(epochs) == np.arange(size)).all()
    if size > 10:
        assert len({tuple(e) for e in epochs}) == 5
        for other in (shuffled(np.arange(size), size, 4, 0), shuffled(np.arange(size), size, 3, 1)):
            assert tuple(other) != tuple(epochs[0])
    mixed = np.random.Generator(np.random.PCG64(0)).permutation(5 * size)
    assert (shuffled(mixed, size, 3, 0) == whole[mixed]).all()
    assert all(shuffled(np.array([n]), size, 3, 0) == whole[n] for n in range(0, 5 * size, max(1, size // 7)))


def test_a_permutation_has_no_pattern() -> None:
    """Mean distance of neighbours, fixed points and correlation are those of random orders."""
    n = 4000
    for seed in range(3):
        p = shuffled(np.arange(n), n, seed, 0)
        assert abs(np.abs(np.diff(p)).mean() / n - 1 / 3) < 0.02
        assert (p == np.arange(n)).sum() < 8 and abs(np.corrcoef(p, np.arange(n))[0, 1]) < 0.06


def test_a_huge_source_costs_no_memory() -> None:
    size = 10**12 + 39
    got = shuffled(np.arange(3 * size - 500, 3 * size + 500), size, 0, 0)
    assert len(set(got[:500].tolist())) == 500 and (got >= 0).all() and (got < size).all()


def test_hashes_are_even_and_depend_on_every_part() -> None:
    numbers = np.arange(100_000)
    h = hashed(1, 2, numbers)
    assert len(set(h.tolist())) == len(h)
    bits = (h[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert (np.abs(bits.mean(0) - 0.5) < 0.01).all()
    for other in (hashed(2, 2, numbers), hashed(1, 3, numbers), hashed(1, 2, numbers + 1), hashed(2**70, 2, numbers)):
        assert (h != other).all()
        assert abs(((h >> np.uint64(63)) == (other >> np.uint64(63))).mean() - 0.5) < 0.01


WEIGHTS = [[1], [1, 1], [0.7, 0.3], [0.1, 0.2, 0.7], [5, 3, 1, 1, 90], [1e-3, 1], [7, 11, 13], [1 / 3, 2 / 3]]


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("seed", [0, 1, 99])
def test_shares_are_exact_at_every_length(weights: list[float], seed: int) -> None:
    """After n samples each source has had n * weight to within K, and exactly that after a whole period."""
    parts = [Fraction(str(w)) for w in weights]
    share = [p / sum(parts) for p in parts]
    sources, numbers = Mixture(weights, seed).samples(0, 3000)
    for k, part in enumerate(share):
        had = np.cumsum(sources == k)
        wanted = float(part) * np.arange(1, 3001)
        assert np.abs(had - wanted).max() < len(weights)
        assert (numbers[sources == k] == np.arange(had[-1])).all()  # its samples in order, none twice
    period = np.lcm.reduce([int(p.denominator) for p in share])
    if period <= 3000:
        assert Counter(sources[:period].tolist()) == {k: int(p * period) for k, p in enumerate(share)}


@pytest.mark.parametrize("weights", WEIGHTS)
def test_direct_access_equals_a_walk(weights: list[float]) -> None:
    mixture = Mixture(weights, 5)
    sources, numbers = mixture.samples(0, 2000)
    for first, count in ((0, 1), (1, 1), (3, 40), (777, 13), (1990, 10)):
        got = mixture.samples(first, count)
        assert (got[0] == sources[first : first + count]).all() and (got[1] == numbers[first : first + count]).all()
    steps = [mixture.samples(s * 16, 16) for s in range(125)]
    assert (np.concatenate([s[0] for s in steps]) == sources).all()
    assert (np.concatenate([s[1] for s in steps]) == numbers).all()


def test_far_steps_are_exact() -> None:
    """No rounding at 1e18 samples: neighbouring batches join without a gap or a repeat."""
    mixture, first = Mixture([0.7, 0.2, 0.1], 0), 10**18
    sources, numbers = mixture.samples(first, 100)
    for k in range(3):
        assert (np.diff(numbers[sources == k]) == 1).all()
        assert abs(numbers[sources == k][0] - first * [7, 2, 1][k] // 10) < 3
    joined = np.concatenate([mixture.samples(first + 10 * i, 10)[1] for i in range(10)])
    assert (joined == numbers).all()


def test_the_seed_moves_the_mixture() -> None:
    runs = {tuple(Mixture([0.5, 0.3, 0.2], seed).samples(0, 30)[0].tolist()) for seed in range(10)}
    assert len(runs) > 5
