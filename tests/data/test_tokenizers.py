"""Tokenizers spell every text, training can be repeated, and a tokenizer.json is read as it is meant."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import tokenizers as hf
from tokenizers import decoders, models, pre_tokenizers, processors

from research.data.tokenizers import Bytes, Library, Tokenizer

TRAINED_ON = [
    "the cat sat on the mat, the cat ate the rat\n" * 20,
    "def function(value):\n    return value + 1\n" * 20,
    "",
]
TEXTS = [
    "",
    "\x00",
    "a\x00b",
    " ",
    "\n\n  \t\r\n",
    " leading and trailing ",
    "the cat",
    "na\u00efve \u4f60\u597d \u0e17\u0e35\u0e48 e\u0301",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\ufeffbom \ufffd \U0010ffff",
    "<|end|><|endoftext|></s>[UNK]",
    "\u0120 \u010a: letters that stand for bytes inside the library",
]


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Bytes() if request.param == "bytes" else Library.train(TRAINED_ON, 280)


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids.ndim == 1 and ids.dtype == "uint32"
    assert (ids < tokenizer.vocab_size).all() and tokenizer.end not in ids
    assert tokenizer.decode(ids.tolist()) == text
    assert tokenizer.decode([*ids.tolist(), tokenizer.end]) == text


def test_round_trip_of_random_characters(tokenizer: Tokenizer) -> None:
    draw = random.Random(0)
    characters = [*range(0xD800), *range(0xE000, 0x110000)]  # all but surrogates, which are no text
    for _ in range(200):
        text = "".join(chr(draw.choice(characters) if draw.random() < 0.5 else draw.randrange(128)) for _ in range(50))
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids.tolist()) == text and tokenizer.end not in ids


def test_a_character_cut_in_two_does_not_raise(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\U0001f600")[:3].tolist()) == "a\ufffd"


def test_bytes_are_their_ids() -> None:
    assert Bytes().encode("A\u00e9").tolist() == [65, 0xC3, 0xA9]
    assert (Bytes.end, Bytes.vocab_size) == (245, 246)


def test_bpe_uses_what_it_is_given() -> None:
    bpe = Library.train(TRAINED_ON, 280)
    assert (bpe.vocab_size, bpe.end) == (280, 279)
    assert len(bpe.encode("the cat sat")) < 6
    least = Library.train(["ab"], 4096)
    assert least.end == least.vocab_size - 1 and 257 <= least.vocab_size < 262


def test_bpe_training_repeats_and_is_kept_in_json(tmp_path: Path) -> None:
    bpe = Library.train(TRAINED_ON, 280)
    assert Library.train(TRAINED_ON, 280).to_json() == bpe.to_json()
    (tmp_path / "bpe.json").write_text(bpe.to_json(), encoding="utf-8")
    again = Library.load(tmp_path / "bpe.json")
    assert (again.vocab_size, again.end) == (bpe.vocab_size, bpe.end)
    assert all(again.encode(text).tolist() == bpe.encode(text).tolist() for text in TEXTS)


def test_a_fork_after_training_can_use_and_train(capfd: pytest.CaptureFixture[str]) -> None:
    """The pool of threads that training leaves behind does not exist in a forked rank."""
    bpe = Library.train(TRAINED_ON, 280)
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # a deadlock ends here
        same = Library.train(TRAINED_ON, 280).encode("the cat").tolist() == bpe.encode("the cat").tolist()
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert capfd.readouterr().err == ""


def write_tokenizer(folder: Path, eos: object = None) -> Path:
    """A byte-level tokenizer.json that asks for all that is to be left off: a start token, a cut, padding."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = hf.Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<eos>", "<start>"])
    library.post_processor = processors.TemplateProcessing(single="<start> $A", special_tokens=[("<start>", 257)])
    library.enable_truncation(3)
    library.enable_padding(length=8)
    folder.mkdir(exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    if eos is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("eos", ["<eos>", {"content": "<eos>"}, None])
def test_a_tokenizer_json(tmp_path: Path, eos: object) -> None:
    tokenizer = Library.load(write_tokenizer(tmp_path, eos))
    assert (tokenizer.end, tokenizer.vocab_size) == ((256, 258) if eos else (258, 259))
    for text in [*TEXTS, "<eos> is <start> no special token here"]:
        ids = tokenizer.encode(text)
        assert len(ids) == len(text.encode()) and (ids < 256).all()
        assert tokenizer.decode([*ids.tolist(), tokenizer.end]) == text


def test_the_identity_follows_what_decides_the_ids(tmp_path: Path) -> None:
    folders = [write_tokenizer(tmp_path / n, eos) for n, eos in (("a", "<eos>"), ("b", "<start>"), ("c", "<eos>"))]
    a, b, c = (Library.load(f).identity for f in folders)
    assert a == c != b and Library.train(TRAINED_ON, 280).identity not in (a, b)


@pytest.mark.parametrize(
    ("content", "beside", "message"),
    [
        (None, None, "does not exist"),
        ("{", None, "is no tokenizer"),
        ("{}", None, "is no tokenizer"),
        ("", "{", r"has a tokenizer_config\.json beside it that cannot be read"),
        ("", "[]", r"has a tokenizer_config\.json beside it that cannot be read"),
        ("", '{"eos_token": "<no>"}', "does not know the eos_token '<no>'"),
    ],
)
def test_a_file_that_is_no_tokenizer(tmp_path: Path, content: str | None, beside: str | None, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    if content == "":
        write_tokenizer(tmp_path)
    elif content is not None:
        path.write_text(content)
    if beside is not None:
        (tmp_path / "tokenizer_config.json").write_text(beside)
    with pytest.raises(ValueError, match=message):
        Library.load(path)


def test_text_without_spaces_is_tokenised_in_time():
    """Merging takes time quadratic in the length of a piece, so pieces must be cut."""
    text = "x" * 500_000
    begin = time.monotonic()
    tokenizer = Library.train([text, "some words"], 300)
    ids = tokenizer.encode(text)
    assert time.monotonic() - begin < 20
    assert tokenizer.decode(ids) == text and len(ids) < len(text) / 8
