"""Text to ids and back. Both tokenizers can spell any text, so there is no unknown token."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers as hf
from tokenizers import decoders, models, pre_tokenizers, trainers


class Tokenizer(Protocol):
    """`decode(encode(text)) == text` for every text; `end` closes a document and is never part of a text."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end(self) -> int: ...

    def encode(self, text: str) -> np.ndarray:
        """(tokens,) uint32, without `end`."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids below `vocab_size`; `end` is left out, a character cut in two becomes U+FFFD."""


class Bytes:
    """The id is the UTF-8 byte. UTF-8 never uses bytes 0xF5 to 0xFF, so the first of them is free to be `end`."""

    end = 0xF5
    vocab_size = end + 1

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i != self.end).decode("utf-8", errors="replace")


class Bpe:
    """Byte-level BPE. `end` is the id after those of the library, so that no text, whatever it says, encodes to it.

    Texts are encoded one by one, which uses no thread pool. Training does; the library turns its pool off in
    processes that are forked later.
    """

    def __init__(self, library: hf.Tokenizer) -> None:
        self._library = library
        self.end = library.get_vocab_size()
        self.vocab_size = self.end + 1

    @classmethod
    def train(cls, documents: Iterable[str], vocab_size: int) -> "Bpe":
        """Train on all documents; the same documents give the same ids. About 0.1 s per MB of text on two cores.

        A short text may give fewer than `vocab_size` entries; 257 (the bytes and `end`) is the least.
        """
        library = hf.Tokenizer(models.BPE())
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        library.train_from_iterator(documents, trainer)
        return cls(library)

    @classmethod
    def load(cls, path: Path) -> "Bpe":
        return cls(hf.Tokenizer.from_str(path.read_text(encoding="utf-8")))

    def to_json(self) -> str:
        return self._library.to_str()

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._library.encode(text).ids, np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return self._library.decode(list(ids))  # which leaves out ids that the library does not know: `end`
