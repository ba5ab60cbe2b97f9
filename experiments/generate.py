"""Go on from prompts, with the weights of a checkpoint or of a Hugging Face folder.

    python -m experiments.generate CHECKPOINT --prompt "def f(x):" --prompt "import"
    python -m experiments.generate HF_FOLDER --prompt "Once" generate.temperature=0.8 generate.top_p=0.95 tp.degree=2
    python -m experiments.generate CHECKPOINT --prompt "def f(x):" --stop "def" --json generate.tokens=200

CHECKPOINT is the folder of one, or of a run, whose newest one is taken. Any layout wrote it and any reads it: degrees
are those of the words. --stop TEXT ends a text before TEXT, --json prints one JSON object. Depths of multi-token
prediction are left out, and experts have no capacity: who shares a batch shall not change a text.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from experiments.command import devices_here, launch, main
from research import settings
from research.data.tokenizers import Tokenizer
from research.generate.prompts import encoded, problems
from research.generate.run import Generated, ending, generate
from research.generate.source import SOURCES, open_source, require_fit
from research.generate.tokenizer import tokenizer_of
from research.launch.environment import Joined
from research.parallel import axis
from research.problems import ConfigError, Problem, WeightsError
from research.train.checkpoint.index import CheckpointError

OPTIONS = ("--prompt", "--stop", "--json")


@dataclass
class Asked:
    """The words of a command."""

    prompts: list[str] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)
    json: bool = False
    words: list[str] = field(default_factory=list)


def read(words: Sequence[str]) -> Asked:
    asked, left = Asked(), iter(words)
    texts = {"--prompt": asked.prompts, "--stop": asked.stops}
    for word in left:
        name, equals, value = word.partition("=")
        if name in texts:
            text = value if equals else next(left, None)
            if text is None or (not equals and text in OPTIONS) or (name == "--stop" and not text):
                raise ConfigError([Problem(name, None, "names no text", f"{name} TEXT, or {name}=TEXT")])
            if any("\ud800" <= c <= "\udfff" for c in text):  # what stands for other bytes of a command line
                raise ConfigError([Problem(f"{name} {text!r}", None, "is not UTF-8")])
            texts[name].append(text)
        elif word == "--json":
            asked.json = True
        else:
            asked.words.append(word)
    if not asked.words:
        raise ConfigError([Problem("experiments.generate", None, "is given no model", SOURCES)])
    if not asked.prompts:
        raise ConfigError([Problem("--prompt", None, "is missing", "--prompt TEXT, once or more")])
    return asked


def told(asked: Asked, done: Generated, tokenizer: Tokenizer) -> dict[str, Any]:
    texts = []
    for prompt, t in zip(asked.prompts, done.texts, strict=True):
        text = tokenizer.decode(t.made[:-1] if t.ended == "end" else t.made)
        text = text[: min((at for s in asked.stops if (at := text.find(s)) >= 0), default=len(text))]
        texts.append({"prompt": prompt, "text": text, "ended": t.ended, "prompt_ids": t.prompt, "ids": t.made})
    speed = sum(len(t.made) for t in done.texts) / done.seconds
    return {"texts": texts, "tokens_per_s": speed, "cache_bytes_per_token": done.cache_token_bytes}


def go_on(words: Sequence[str], where: Joined | None) -> int:
    asked = read(words)
    try:
        source = open_source(Path(asked.words.pop(0)))
        world = where.place.world if where else None
        checks = (axis.problems, problems) if where else (axis.problems, problems, devices_here)
        config = settings.from_mapping(source.keys, asked.words, checks, world)
        require_fit(source, config)
    except (CheckpointError, WeightsError) as error:
        print(error, file=sys.stderr)
        return 2
    tokenizer = tokenizer_of(config.data, source.corpus, asked.words)
    prompts = encoded(asked.prompts, tokenizer, source, config)
    ends = ending((tokenizer.end, *source.ends), asked.stops, tokenizer.decode)
    vocab = min(tokenizer.vocab_size, config.model.vocab)
    first = where is None or where.place.rank == 0
    if source.left_out and first:
        print("left out:", *(settings.word(k, v) for k, v in source.left_out.items()), file=sys.stderr)
    done = launch(partial(generate, source, config, prompts, ends, vocab), config, where)
    if first:
        found = told(asked, done, tokenizer)
        if asked.json:
            print(json.dumps(found))
        else:
            for t in found["texts"]:
                print(f"{t['prompt']}{t['text']}\n[{t['ended']}, {len(t['ids'])} tokens]\n")
            print(f"{found['tokens_per_s']:,.1f} tokens/s", end=", ", file=sys.stderr)
            print(f"{found['cache_bytes_per_token']:,} bytes of cache a token on each rank", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(__doc__, go_on, needs="checkpoint or folder"))
