"""Tokenise a corpus with every tokenizer and say what each makes of it.

python -m experiments.corpus experiments/configs/small.yaml
python -m experiments.corpus data.path=[notes,papers.jsonl] data.tokenizer=tokenizer.json
"""

import math
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from experiments.command import main, read_config
from research import config as configs
from research.data.corpus import find
from research.data.tokens import open_tokens
from research.launch.environment import Joined


def corpus(words: Sequence[str], where: Joined | None) -> int:
    config = read_config(words)
    columns = ("tokenizer", "vocabulary", "tokens", "bytes a token", "unigram entropy, nats a token", "bits a byte")
    table = Table(*columns, title=f"data.path={', '.join(config.data.path)}")
    given = any(find(path).tokenised for path in config.data.path)
    tokenizers = [config.data.tokenizer] if given else ["bytes", "bpe", config.data.tokenizer]
    for tokenizer in dict.fromkeys(tokenizers):
        found = open_tokens(configs.replace(config, {"data.tokenizer": tokenizer}).data)
        share, bits = "unknown", "unknown"  # token files do not tell the bytes of their text
        if found.text_bytes is not None:
            share = f"{found.text_bytes / found.tokens:.2f}"
            bits = f"{found.unigram_entropy / math.log(2) * found.tokens / found.text_bytes:.3f}"
        table.caption = f"{sum(len(s.offsets) - 1 for s in found.sources):,} documents"
        numbers = [max(s.vocab_size for s in found.sources), found.tokens]
        named = "as stored" if all(s.byte_offsets is None for s in found.sources) else tokenizer
        table.add_row(named, *(f"{n:,}" for n in numbers), share, f"{found.unigram_entropy:.4f}", bits)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(__doc__, corpus, needs="config"))
