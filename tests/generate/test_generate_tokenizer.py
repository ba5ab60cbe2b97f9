"""The tokenizer of a model in the Hugging Face folder that it is exported to, for us and for transformers."""

import dataclasses
import json

import pytest
import transformers

from research.config import DataConfig, ModelConfig, RunConfig
from research.data.tokenizers import Bytes, Library
from research.data.tokens import open_tokens
from research.generate.tokenizer import tokenizer_files, tokenizer_of
from research.problems import ConfigError

TEXTS = ["line 3: don't  stop,\n\n\tat 2024 or õ", "e\u0301 <s> 多", " "]
MODEL = ModelConfig(vocab=300)


@pytest.fixture
def bpe(text, tmp_path):
    """A config with a trained BPE, and the digest of its text."""
    data = DataConfig(path=(str(text),), tokenizer="bpe", bpe_vocab=300, cache=str(tmp_path / "cache"))
    return RunConfig(model=MODEL, data=data), open_tokens(data).digest


def folder(files, place, family="llama"):
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"model_type": family}))
    for name, content in files.items():
        (place / name).write_bytes(content)
    return place


def same(tokenizer, place):
    loaded = transformers.AutoTokenizer.from_pretrained(place)
    return all(loaded(t)["input_ids"] == tokenizer.encode(t).tolist() for t in TEXTS)


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_ours_come_back_with_the_same_ids(kind, bpe, tmp_path):
    config, digest = bpe
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=kind))
    tokenizer = tokenizer_of(config.data, digest if kind == "bpe" else None, [])
    files, note = tokenizer_files(config, digest if kind == "bpe" else None, [])
    place = folder(files, tmp_path / "hf", "qwen3_moe")
    back = Library.load(place / "tokenizer.json")
    assert (back.end, back.vocab_size) == (tokenizer.end, tokenizer.vocab_size)
    for text in TEXTS:
        assert back.encode_prompt(text).tolist() == tokenizer.encode(text).tolist()
        assert back.decode(back.encode(text).tolist()) == text
    assert same(tokenizer, place)
    assert json.loads(files["generation_config.json"]) == {"eos_token_id": tokenizer.end}
    assert (
        note
        == f"what ends a text is no token of tokenizer.json: id {tokenizer.end}, which generation_config.json names"
    )


def test_planted_tokenizer_without_its_class(bpe, tmp_path):
    """transformers then makes the one of the family, which cuts texts by other rules."""
    files, _ = tokenizer_files(*bpe, [])
    del files["tokenizer_config.json"]
    assert not same(tokenizer_of(bpe[0].data, bpe[1], []), folder(files, tmp_path / "hf", "qwen3_moe"))


def test_a_file_is_copied_with_the_config_beside_it(bpe, tmp_path):
    files, _ = tokenizer_files(*bpe, [])
    config = b'{"eos_token": {"content": "line"}, "chat_template": "x"}'
    place = folder({**files, "tokenizer_config.json": config}, tmp_path / "own")
    data = dataclasses.replace(bpe[0].data, tokenizer=str(place / "tokenizer.json"))
    found, note = tokenizer_files(RunConfig(model=MODEL, data=data), None, [])
    assert found["tokenizer.json"] == files["tokenizer.json"] and found["tokenizer_config.json"] == config
    end = Library.load(place / "tokenizer.json").encode("line").tolist()
    assert [json.loads(found["generation_config.json"])["eos_token_id"]] == end and note == ""
    (place / "tokenizer_config.json").unlink()
    small = dataclasses.replace(MODEL, vocab=end[0])  # no row for the id after those of the file
    found, note = tokenizer_files(RunConfig(model=small, data=data), None, [])
    assert found.keys() == {"tokenizer.json", "tokenizer_config.json"}
    assert note == "what ends a text is no token of tokenizer.json: no id of this model"


def test_what_is_left_out_and_why(bpe, text, tmp_path):
    config, digest = bpe
    text.write_text(text.read_text() + "more")

    def told(words=(), model=MODEL, **changes):
        data = dataclasses.replace(config.data, **changes)
        files, note = tokenizer_files(RunConfig(model=model, data=data), digest, words)
        assert files == {}
        return note

    legal = "; legal: data.tokenizer=bytes, or data.tokenizer=PATH of a tokenizer.json"
    assert "is not the text any more that the tokenizer was trained on; legal: the same text, or data.tok" in told()
    assert (
        told(tokenizer="x.json")
        == f"left out: tokenizer, as x.json does not exist: who made the ids is not known{legal}"
    )
    assert told(tokenizer="bytes", path=("ids.bin",)).endswith(f"the ids of data.path is not known{legal}")
    few = "left out: tokenizer, as model.vocab=99 has no rows for all 246 ids of data.tokenizer=bytes"
    assert told(tokenizer="bytes", model=dataclasses.replace(MODEL, vocab=99)) == few + legal
    with pytest.raises(ConfigError, match=r"data.tokenizer=x.json does not exist"):
        told(tokenizer="x.json", words=["data.tokenizer=x.json"])


def test_bytes_that_are_no_utf8_come_back_alike(tmp_path):
    """Ids as a model may make them."""
    back = Library.load(folder({"tokenizer.json": Bytes().to_json().encode()}, tmp_path / "hf") / "tokenizer.json")
    for first in range(Bytes.end):
        ids = [first, 0x80, 0xE5, 0xA4, 0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x41]
        assert back.decode(ids) == Bytes().decode(ids)
