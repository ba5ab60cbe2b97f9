"""Prompts as ids, and what a model cannot go on from."""

from collections.abc import Iterator, Sequence

from research.config import RunConfig, degrees
from research.data.tokenizers import Library, Tokenizer
from research.generate.source import Source
from research.problems import ConfigError, Problem


def problems(config: RunConfig) -> Iterator[Problem]:
    """Keys that mean something in training only."""
    if (degree := degrees(config)["cp"]) > 1:
        yield Problem("cp.degree", degree, "is for training: each cache holds whole texts", "1")
    for name, rule in (("mtp_depth", "is no part of generation"), ("capacity", "would let texts change each other")):
        if value := getattr(config.model, name):
            yield Problem(f"model.{name}", value, rule, "0")
    if config.model.load != "routed":
        yield Problem("model.load", config.model.load, "would choose experts by a token's place", "routed")


def encoded(prompts: Sequence[str], tokenizer: Tokenizer, source: Source, config: RunConfig) -> list[list[int]]:
    """Ids of each prompt: as transformers makes them where no run of ours trained the model. Raises ConfigError where
    a prompt is too long, or the model does not know an id."""
    found = list[Problem]()
    encode = tokenizer.encode_prompt if isinstance(tokenizer, Library) and source.corpus is None else tokenizer.encode
    ids: list[list[int]] = [encode(p).tolist() for p in prompts]
    for prompt, tokens in zip(prompts, ids, strict=True):
        found += _unfit(f"--prompt {prompt[:20]!r}", tokens, config)
    if found:
        raise ConfigError(found)
    return ids


def _unfit(prompt: str, ids: Sequence[int], config: RunConfig) -> Iterator[Problem]:
    m, g, positions = config.model, config.generate, _positions(config)
    if not ids:
        yield Problem(prompt, None, "has no token to go on from: the tokenizer puts none before a text", "a text")
        return
    if max(ids) >= m.vocab:
        rule = f"has no row for id {max(ids)}, which data.tokenizer={config.data.tokenizer} gives {prompt}"
        yield Problem("model.vocab", m.vocab, rule, "the tokenizer of this model")
    if (end := len(ids) + g.tokens) > positions:
        rule = (
            f"has {len(ids)} tokens, and generate.tokens={g.tokens} more end past the {positions} positions that the "
        )
        rule += "model was made for (data.sequence, or what RoPE is scaled to)"
        legal = f"at most {positions - len(ids)} more" if len(ids) < positions else "a shorter prompt"
        yield Problem(prompt, None, rule, f"{legal}, or another data.sequence")
    elif 0 < g.cache_tokens // g.block * g.block < end - 1:
        rule = f"has no room for the {end - 1} tokens that are kept of {prompt} with generate.tokens={g.tokens}"
        yield Problem(
            "generate.cache_tokens", g.cache_tokens, rule, f"0, or at least {-(-(end - 1) // g.block) * g.block}"
        )


def _positions(config: RunConfig) -> int:
    m = config.model
    scaled = m.rope_context * m.rope_factor if m.rope_scaling in ("llama3", "yarn") else 0
    return max(config.data.sequence, int(scaled))
