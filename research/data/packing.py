"""Documents laid end to end and cut into windows, with their boundaries kept.

G windows, L tokens of one, D documents
"""

import numpy as np

from research.data.order import HELDOUT, hashed
from research.data.tokens import Tokens

CHUNK = 1 << 20  # documents whose hash is computed at once


class Packed:
    """Some documents of a source as one stream. All of them need no memory; a part takes 17 bytes for each."""

    def __init__(self, tokens: Tokens, chosen: np.ndarray | None = None) -> None:
        """`chosen`: (documents,) truth values; None takes all."""
        self.path = tokens.path
        self._ids = np.asarray(tokens.ids)  # a plain array: indexing a memmap object is slower
        offsets = np.asarray(tokens.offsets)
        if chosen is None:
            self._begins, self._shift = offsets, np.broadcast_to(np.int64(0), len(offsets) - 1)
        else:
            lengths = np.diff(offsets)[chosen]
            self._begins = np.concatenate([[0], np.cumsum(lengths)])
            self._shift = offsets[:-1][chosen] - self._begins[:-1]
        self.documents = len(self._shift)
        self.text_bytes: int | None = None  # UTF-8 bytes; None where a token file does not tell
        if tokens.byte_offsets is not None:
            sizes = tokens.byte_offsets[-1:] if chosen is None else np.diff(tokens.byte_offsets)[chosen]
            self.text_bytes = int(sizes.sum())

    def __len__(self) -> int:
        """Tokens."""
        return int(self._begins[-1])

    @property
    def targets(self) -> int:
        """Tokens that follow another one of their document: what a model can be asked to predict."""
        return len(self) - int((np.diff(self._begins) > 0).sum())

    def windows(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """(G,) places -> the ids from each place on, and the documents that they belong to: two (G, L) int64. Past the
        end of the stream stands id 0 of document -1."""
        ends = np.minimum(starts + length, len(self))
        first = np.searchsorted(self._begins, starts, "right") - 1
        each = np.searchsorted(self._begins, ends, "left") - first  # documents that a window meets
        window = np.repeat(np.arange(len(starts)), each)
        met = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each - first, each)
        low, high = np.maximum(self._begins[met], starts[window]), np.minimum(self._begins[met + 1], ends[window])
        inside = np.arange(length) < (ends - starts)[:, None]
        places = starts[:, None] + np.arange(length)
        ids = np.zeros((len(starts), length), np.int64)
        documents = np.full((len(starts), length), -1)
        documents[inside] = np.repeat(met, high - low)
        ids[inside] = self._ids[places[inside] + np.repeat(self._shift[met], high - low)]
        return ids, documents


def held_out(documents: int, share: float, seed: int, source: int) -> np.ndarray:
    """(documents,) whether each document of a source is kept from training: about `share` of them, each by a hash of
    (seed, source, its number) alone."""
    chosen = np.empty(documents, bool)
    limit = np.uint64(int(share * 2**64))
    for begin in range(0, documents, CHUNK):
        numbers = np.arange(begin, min(begin + CHUNK, documents))
        chosen[begin : begin + CHUNK] = hashed(seed, HELDOUT, source, numbers) < limit
    return chosen
