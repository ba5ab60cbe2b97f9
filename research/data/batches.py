"""The global batch of every step, and the batches of an evaluation: the same in every layout.

S tokens of a sample, G samples of a step, M microbatches, R rows of a batch
"""

from collections.abc import Sequence

import numpy as np
import torch

from research.data.order import Mixture, shuffled
from research.data.packing import Packed
from research.models.batch import NOT_COUNTED, Ahead, Batch
from research.problems import ConfigError, Problem


class GlobalBatches:
    """Step s takes samples s*G to s*G+G-1 of a mixture of sources (`Mixture`); sample i of a source is S+1 tokens from
    place i*S of its stream: S inputs and, one further, their targets. A source gives each of its samples once in each
    of its epochs (`shuffled`). Any step can be asked for directly, at the same cost.

    The loader draws from no random generator: global ones are neither read nor moved.
    """

    def __init__(
        self,
        sources: Sequence[Packed],
        sequence: int,
        global_batch: int,
        microbatches: int,
        seed: int,
        weights: Sequence[float] = (),
        ahead: int = 0,
    ) -> None:
        """`weights`: share of the samples from each source; () goes by their numbers of samples. `ahead`: depths of
        multi-token prediction; they change no sample.

        Raises ConfigError naming the files where a source holds no sample or no target, or all together not one global
        batch.
        """
        self.samples = [(len(s) - 1) // sequence for s in sources]  # the last target needs one token more
        if min(self.samples) < 1 or sum(self.samples) < global_batch:
            told = "; ".join(
                f"data.path={s.path} has {len(s)} tokens in {s.documents} documents for training, which make "
                f"{max(n, 0)} samples of data.sequence={sequence}"
                for s, n in zip(sources, self.samples, strict=True)
            )
            rule = f"needs as many samples, and one of each source: {told}"
            raise ConfigError([Problem("train.global_batch", global_batch, rule, "more text, or shorter samples")])
        if idle := [s for s in sources if not s.targets]:
            rule = "holds nothing to predict: {} tokens in {} documents for training, none of which has two"
            problems = [
                Problem("data.path", s.path, rule.format(len(s), s.documents), "longer documents") for s in idle
            ]
            raise ConfigError(problems)
        self._sources, self._sequence, self._seed = sources, sequence, seed
        self._global_batch, self._microbatches, self._ahead = global_batch, microbatches, ahead
        self._mixture = Mixture(weights or self.samples, seed)

    def microbatches_of(self, step: int) -> list[Batch]:
        """Global batch `step` (from 0) as M batches of shape (G/M, S); where M does not divide G, the first have one
        sample more. The first token of a document is not counted as a target: nothing could predict it. Nor are, at
        depth k of multi-token prediction, the first k + 1 tokens of a document or of a sample.
        """
        sources, numbers = self._mixture.samples(step * self._global_batch, self._global_batch)
        places = np.empty_like(numbers)
        for k in np.unique(sources):
            here = sources == k
            places[here] = shuffled(numbers[here], self.samples[k], self._seed, int(k)) * self._sequence
        batch = _batch(self._sources, sources, places, self._sequence, ahead=self._ahead)
        return [batch.part(m, self._microbatches) for m in range(self._microbatches)]


class HeldOut:
    """The held-out documents in order, source after source, as `len()` batches of R samples.

    Every token that follows another one of its document is a target exactly once; the last batch is filled up with
    rows in which nothing is counted. A sample sees nothing before its own first token.
    """

    def __init__(self, sources: Sequence[Packed], sequence: int, rows: int) -> None:
        """Raises ConfigError naming the files where no document holds a target."""
        self.counted = sum(s.targets for s in sources)
        if not self.counted:
            told = "; ".join(f"data.path={s.path} gives {s.documents} documents, {len(s)} tokens" for s in sources)
            rule = f"holds out nothing: {told}"
            raise ConfigError([Problem("data.heldout", None, rule, "a larger share, or more documents")])
        sizes = [s.text_bytes for s in sources]
        self.text_bytes = None if None in sizes else sum(s or 0 for s in sizes)  # UTF-8; None: a token file
        self._sources, self._sequence, self._rows = sources, sequence, rows
        windows = [-(-max(len(s) - 1, 0) // sequence) for s in sources]  # the last one has a next token to predict
        self._numbers = np.repeat(np.arange(len(sources)), windows)
        self._places = np.concatenate([np.arange(n) * sequence for n in windows])

    def __len__(self) -> int:
        return -(-len(self._places) // self._rows)

    def batch(self, number: int) -> Batch:
        """Batch `number` (from 0), of shape (R, S)."""
        here = slice(number * self._rows, (number + 1) * self._rows)
        return _batch(self._sources, self._numbers[here], self._places[here], self._sequence, self._rows)


def _batch(
    sources: Sequence[Packed],
    numbers: np.ndarray,
    places: np.ndarray,
    sequence: int,
    rows: int | None = None,
    ahead: int = 0,
) -> Batch:
    """One sample from each (source number, place): a batch of as many rows, filled up to `rows`."""
    ids = np.zeros((rows or len(places), sequence + 1), np.int64)
    documents = np.full_like(ids, -1)
    for k in np.unique(numbers):
        here = np.flatnonzero(numbers == k)
        ids[here], documents[here] = sources[k].windows(places[here], sequence + 1)
    (tokens, targets), *further = (_shifted(ids, documents, k) for k in range(ahead + 1))
    positions = torch.arange(sequence).repeat(len(ids), 1)
    depths = tuple(Ahead(*pair) for pair in further)
    return Batch(tokens, targets, positions, torch.tensor(documents[:, :-1]), ahead=depths)


def _shifted(ids: np.ndarray, documents: np.ndarray, by: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(R, S+1) each -> for each of the first S places, the id `by` places further (0 past the end), and the one after
    that where it is of the same document as the place itself."""
    length = ids.shape[1] - 1
    begins = documents[:, :-1]
    ids, documents = (np.pad(a, ((0, 0), (0, by)), constant_values=c) for a, c in ((ids, 0), (documents, -1)))
    follows = (documents[:, by + 1 :] == begins) & (begins >= 0)
    targets = np.where(follows, ids[:, by + 1 :], NOT_COUNTED)
    return torch.tensor(ids[:, by : by + length]), torch.tensor(targets)
