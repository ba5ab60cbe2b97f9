"""The global batch of every step: a function of (seed, step), the same in every layout.

S tokens of a sample, G samples of a step, M microbatches, N samples of an epoch.
"""

from functools import lru_cache

import numpy as np
import torch

from research.data.tokens import Tokens
from research.models.batch import NOT_COUNTED, Batch


class GlobalBatches:
    """Sample i is tokens i*S to i*S+S of the stream: S inputs and, one further, their targets.

    Epoch e visits all N samples in an order drawn from (seed, e) alone. Step s takes samples s*G to s*G+G-1 of the
    epochs laid end to end, so any step can be asked for directly, and a batch may begin one epoch and end in the next.
    The loader owns its random generator: global ones are neither read nor moved.
    """

    def __init__(self, tokens: Tokens, sequence: int, global_batch: int, microbatches: int, seed: int) -> None:
        """Raises ValueError naming the file where the text is too short for one global batch."""
        self.samples = (len(tokens.ids) - 1) // sequence  # the last target needs one token more
        if self.samples < global_batch:
            raise ValueError(
                f"data.path={tokens.path} has {len(tokens.ids)} tokens, which make {max(self.samples, 0)} samples of "
                f"data.sequence={sequence}; train.global_batch={global_batch} needs at least {global_batch} samples"
            )
        self._ids, self._end = np.asarray(tokens.ids), tokens.end  # a plain array: indexing a memmap object is slower
        self._sequence, self._global_batch, self._microbatches, self._seed = sequence, global_batch, microbatches, seed
        self._order = lru_cache(maxsize=2)(self._draw_order)  # a batch needs two epochs at most

    def microbatches_of(self, step: int) -> list[Batch]:
        """Global batch `step` (from 0) as M batches of shape (G/M, S); where M does not divide G, the first have one
        sample more. What follows an `end` is not counted as a target: nothing could predict it.
        """
        starts = self._samples_of(step) * self._sequence
        window = self._ids[starts[:, None] + np.arange(self._sequence + 1)].astype(np.int64)  # (G, S+1)
        tokens = window[:, :-1]
        targets = np.where(tokens == self._end, NOT_COUNTED, window[:, 1:])
        positions = np.tile(np.arange(self._sequence), (len(starts), 1))
        cuts = (torch.tensor(array).tensor_split(self._microbatches) for array in (tokens, targets, positions))
        return [Batch(*parts) for parts in zip(*cuts, strict=True)]

    def _samples_of(self, step: int) -> np.ndarray:
        """(G,) sample numbers."""
        first, last = step * self._global_batch, (step + 1) * self._global_batch  # in the epochs laid end to end
        parts = []
        for epoch in range(first // self.samples, (last - 1) // self.samples + 1):
            begin = epoch * self.samples
            parts.append(self._order(epoch)[max(first - begin, 0) : last - begin])
        return np.concatenate(parts)

    def _draw_order(self, epoch: int) -> np.ndarray:
        """(N,) sample numbers in the order of this epoch."""
        sequence = np.random.SeedSequence(self._seed, spawn_key=(epoch,))
        return np.random.Generator(np.random.PCG64(sequence)).permutation(self.samples)
