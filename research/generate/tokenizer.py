"""The tokenizer of a model at rest, found again, and the files that give it to others."""

import json
from collections.abc import Sequence
from pathlib import Path

from research.config import DataConfig, RunConfig
from research.data.corpus import given_tokenizer
from research.data.tokenizers import Tokenizer
from research.data.tokens import open_tokenizer
from research.problems import ConfigError, Problem
from research.weights.files import GENERATION, TOKENIZER, TOKENIZER_CONFIG, json_file

MADE = ("bytes", "bpe")  # values of data.tokenizer that name no file
LEGAL = "data.tokenizer=bytes, or data.tokenizer=PATH of a tokenizer.json"
# For transformers, which would else make the tokenizer of the family.
AS_IT_IS = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}


def has_tokenizer(data: DataConfig) -> bool:
    """False: data.tokenizer names a file that is not there."""
    return data.tokenizer in MADE or Path(data.tokenizer).exists()


def tokenizer_of(data: DataConfig, corpus: str | None, words: Sequence[str]) -> Tokenizer:
    """`corpus`: digest of the text that one of our runs was trained on; `words` of this command may choose another
    tokenizer. Raises ConfigError where there is none, or where a BPE that was trained on a text would be trained on
    another one."""
    if data.tokenizer == "bpe":
        return open_tokenizer(data, corpus or "")
    if not _chosen(words) and not has_tokenizer(data):
        raise ConfigError([Problem(data.tokenizer, None, "does not exist: who made the ids is not known", LEGAL)])
    if not _chosen(words) and data.tokenizer == "bytes" and all(Path(p).suffix in (".bin", ".idx") for p in data.path):
        rule = "is the default: who made the ids of data.path is not known"
        raise ConfigError([Problem("data.tokenizer", data.tokenizer, rule, LEGAL)])
    return given_tokenizer(data)


def _chosen(words: Sequence[str]) -> bool:
    return any(word.startswith("data.tokenizer=") for word in words)


def tokenizer_files(config: RunConfig, corpus: str | None, words: Sequence[str]) -> tuple[dict[str, bytes], str]:
    """What a Hugging Face folder holds of the tokenizer (`tokenizer_of`), by name, and a note on what it cannot hold.
    Without a tokenizer there are no files, and the note says why. Raises ConfigError where `words` ask for one."""
    try:
        tokenizer = tokenizer_of(config.data, corpus, words)
        _require_rows(tokenizer, config)
    except ConfigError as error:
        if _chosen(words):
            raise
        return {}, f"left out: tokenizer, as {error.problems[0]}"
    files = _files(tokenizer, config.data)
    if tokenizer.end < config.model.vocab:
        files[GENERATION] = json_file({"eos_token_id": tokenizer.end})
    if json.loads(files[TOKENIZER_CONFIG]).get("eos_token") is not None:
        return files, ""
    end = f"id {tokenizer.end}, which {GENERATION} names" if GENERATION in files else "no id of this model"
    return files, f"what ends a text is no token of {TOKENIZER}: {end}"


def _require_rows(tokenizer: Tokenizer, config: RunConfig) -> None:
    """Raises ConfigError where the model has no row for an id of a tokenizer of ours."""
    name, vocab = config.data.tokenizer, config.model.vocab
    if name in MADE and tokenizer.vocab_size > vocab:
        rule = f"has no rows for all {tokenizer.vocab_size} ids of data.tokenizer={name}"
        raise ConfigError([Problem("model.vocab", vocab, rule, LEGAL)])


def _files(tokenizer: Tokenizer, data: DataConfig) -> dict[str, bytes]:
    """tokenizer.json and the config beside it, copies where data.tokenizer names a file."""
    if data.tokenizer in MADE:
        return {TOKENIZER: tokenizer.to_json().encode(), TOKENIZER_CONFIG: json_file(AS_IT_IS)}
    given = Path(data.tokenizer)
    beside = given.with_name(TOKENIZER_CONFIG)
    own = beside.read_bytes() if beside.exists() else json_file(AS_IT_IS)
    return {TOKENIZER: given.read_bytes(), TOKENIZER_CONFIG: own}
