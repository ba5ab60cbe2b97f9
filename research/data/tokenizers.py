"""Text to ids and back: bytes, a BPE trained on the corpus, or a tokenizer.json."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers as hf
from tokenizers import decoders, models, pre_tokenizers, trainers

LONGEST_PIECE = 256  # characters of a piece in which a trained BPE merges


class Tokenizer(Protocol):
    """`decode(encode(text)) == text` for every text, where a tokenizer.json does not normalise; `end` closes a document
    and is never part of a text."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def identity(self) -> str:
        """Changes when the ids of some text change."""

    def encode(self, text: str) -> np.ndarray:
        """(tokens,) uint32, without `end`."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids below `vocab_size`; `end` is left out, a character cut in two becomes U+FFFD."""

    def to_json(self) -> str:
        """A tokenizer.json of the same ids, whose `end` is the id after them where it is none of its tokens."""


def byte_level(merges: models.BPE) -> hf.Tokenizer:
    """A tokenizer that merges bytes, which are written as `letters_of_bytes`."""
    library = hf.Tokenizer(merges)
    # Merging takes time quadratic in the length of a piece, so that text without spaces must be cut as well.
    pieces = [pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.FixedLength(LONGEST_PIECE)]
    library.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    library.decoder = decoders.ByteLevel()
    return library


def letters_of_bytes() -> list[str]:
    """What a byte-level tokenizer.json calls each byte: the character of its number where that can be seen, else the
    next one from U+0100 (GPT-2, `bytes_to_unicode`)."""
    letters = set(pre_tokenizers.ByteLevel.alphabet())
    others = iter(sorted(c for c in letters if ord(c) > 255))
    return [c if (c := chr(byte)) in letters else next(others) for byte in range(256)]


class Bytes:
    """The id is the UTF-8 byte. UTF-8 never uses bytes 0xF5 to 0xFF, so the first of them is free to be `end`."""

    end = 0xF5
    vocab_size = end + 1
    identity = "bytes"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i != self.end).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        """Of the bytes before `end`: UTF-8 uses no other, and the id after them is `end`."""
        return byte_level(models.BPE({c: byte for byte, c in enumerate(letters_of_bytes()[: self.end])}, [])).to_str()


class Library:
    """A tokenizer of the `tokenizers` library.

    No text, whatever it says, encodes to `end` or another special token. Nothing is added, cut or padded, whatever the
    file asks for. Texts are encoded one by one, which uses no thread pool. Training does; the library turns its pool
    off in processes that are forked later.
    """

    def __init__(self, library: hf.Tokenizer, end: int | None = None) -> None:
        """`end` None is the id after those of the library."""
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = True
        self._library = library
        ids = max(library.get_vocab().values()) + 1
        self.end = ids if end is None else end
        self.vocab_size = max(ids, self.end + 1)
        content = json.dumps([self.to_json(), self.end, hf.__version__])
        self.identity = hashlib.sha256(content.encode()).hexdigest()

    @classmethod
    def train(cls, documents: Iterable[str], vocab_size: int) -> "Library":
        """A byte-level BPE of all documents; the same documents give the same ids. About 0.1 s per MB of text on two
        cores.

        A short text may give fewer than `vocab_size` entries; 257 (the bytes and `end`) is the least.
        """
        library = byte_level(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        library.train_from_iterator(documents, trainer)
        return cls(library)

    @classmethod
    def load(cls, path: Path) -> "Library":
        """A tokenizer.json. `end` is the eos_token of the tokenizer_config.json beside it, where there is one.

        Raises ValueError saying what is wrong with either file.
        """
        try:
            library = hf.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError("does not exist") from None
        except Exception as error:  # the library raises no narrower one
            raise ValueError(f"is no tokenizer: {error}") from error
        beside = path.with_name("tokenizer_config.json")
        if not beside.exists():
            return cls(library)
        try:
            name = json.loads(beside.read_text(encoding="utf-8")).get("eos_token")
        except (OSError, ValueError, AttributeError) as error:
            raise ValueError(f"has a {beside.name} beside it that cannot be read: {error}") from error
        name = name.get("content") if isinstance(name, dict) else name
        end = None if name is None else library.token_to_id(name)
        if name is not None and end is None:
            raise ValueError(f"does not know the eos_token {name!r} of the {beside.name} beside it")
        return cls(library, end)

    def to_json(self) -> str:
        return self._library.to_str()

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._library.encode(text, add_special_tokens=False).ids, np.uint32)

    def encode_prompt(self, text: str) -> np.ndarray:
        """(tokens,) as transformers encodes a text: special tokens that stand in it are those, and what the file puts
        around a text (a first token, say) is put there."""
        self._library.encode_special_tokens = False
        ids = np.array(self._library.encode(text).ids, np.uint32)
        self._library.encode_special_tokens = True
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """`end` is left out, if not by the library, which skips special tokens and ids that it does not know."""
        return self._library.decode([i for i in ids if i != self.end])
