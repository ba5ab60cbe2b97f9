"""Where sample number n of a run comes from: a function of (seed, n), whatever was asked for before.

A run takes samples 0, 1, 2, .. from a mixture of K sources. Sample n is the j-th that is taken from source k, and
source k gives its N samples in another order in each of its epochs.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

ORDER, MIXTURE, HELDOUT = range(3)  # what a hash is drawn for: one seed gives unrelated numbers to each
SHIFTS = 1 << 16
ROUNDS = 4


def hashed(*parts: int | np.ndarray) -> np.ndarray:
    """Evenly spread uint64 of whole numbers and arrays of them, which broadcast (splitmix64, Steele et al. 2014)."""
    h = np.zeros(1, np.uint64)
    for part in parts:
        x = np.atleast_1d(np.asarray(part % 2**64 if isinstance(part, int) else part).astype(np.uint64))
        h = (h ^ x) + np.uint64(0x9E3779B97F4A7C15)
        h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        h = h ^ (h >> np.uint64(31))
    return h


def shuffled(numbers: np.ndarray, size: int, seed: int, source: int) -> np.ndarray:
    """(G,) numbers of samples taken from a source of `size` samples -> (G,) samples; each epoch is a permutation.

    The permutation is computed, not stored: a Feistel network over the next power of 4, walked until it is inside
    (Black and Rogaway 2002). It takes the same time and no memory at any step of any size.
    """
    epochs, places = numbers // size, (numbers % size).astype(np.uint64)
    half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))  # bits of either half
    mask = np.uint64((1 << int(half)) - 1)
    keys = [hashed(seed, ORDER, source, r, epochs) for r in range(ROUNDS)]
    outside = np.ones(len(places), bool)
    while outside.any():
        x = places[outside]
        left, right = x >> half, x & mask
        for key in keys:
            left, right = right, left ^ (hashed(key[outside], right) & mask)
        places[outside] = left << half | right
        outside[outside] = places[outside] >= size
    return places.astype(np.int64)


class Mixture:
    """Sources by sample, in exact shares: source k asks for its sample j at time (j + shift_k) / weight_k, and samples
    are handed out in the order of asking. Shifts in [0, 1) come from the seed; weights add up to 1.

    After any n samples a source has had n * weight_k of them to within K. Exact, as all is whole numbers.
    """

    def __init__(self, weights: Sequence[int | float], seed: int) -> None:
        parts = [Fraction(str(w)) for w in weights]  # 0.1 means one tenth
        self._weights = [p / sum(parts) for p in parts]
        self._shifts = [Fraction(int(hashed(seed, MIXTURE, k)[0] % SHIFTS), SHIFTS) for k in range(len(parts))]
        unit = math.lcm(*(p.numerator for p in self._weights)) * SHIFTS  # every time is a whole number of 1/unit
        self._gaps = [int(unit / p) for p in self._weights]
        self._starts = [int(unit * s / p) for s, p in zip(self._shifts, self._weights, strict=True)]

    def samples(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Samples `first` to first+count-1 of the run: (count,) their sources and (count,) their numbers there."""
        n = len(self._weights)
        # Until time t, t to t + K samples have been asked for, less the shifts: all before t come before `first`.
        low = [self._asked(k, first - n) for k in range(n)]
        high = [self._asked(k, first + count + n) for k in range(n)]
        asked = sorted((self._starts[k] + j * self._gaps[k], k, j) for k in range(n) for j in range(low[k], high[k]))
        skip = first - sum(low)
        _, sources, numbers = zip(*asked[skip : skip + count], strict=True)
        return np.array(sources), np.array(numbers)

    def _asked(self, source: int, time: int) -> int:
        """How many samples the source has asked for before this time."""
        return max(0, math.ceil(time * self._weights[source] - self._shifts[source]))
