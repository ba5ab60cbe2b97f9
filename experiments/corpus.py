"""Tokenise a corpus with every tokenizer and say what each makes of it.

    python -m experiments.corpus experiments/configs/small.yaml
"""

import math
import sys
from collections.abc import Sequence
from typing import get_args, get_type_hints

from rich.console import Console
from rich.table import Table

from experiments.command import main, read_config
from research import config as configs
from research.config import DataConfig
from research.data.tokens import open_tokens
from research.launch.environment import Joined


def corpus(words: Sequence[str], where: Joined | None) -> int:
    config = read_config(words)
    columns = ("tokenizer", "vocabulary", "tokens", "bytes a token", "unigram entropy, nats a token", "bits a byte")
    table = Table(*columns, title=f"data.path={config.data.path}")
    for tokenizer in get_args(get_type_hints(DataConfig)["tokenizer"]):
        tokens = open_tokens(configs.replace(config, {"data.tokenizer": tokenizer}).data)
        share = tokens.text_bytes / len(tokens.ids)
        bits = tokens.unigram_entropy / share / math.log(2)
        numbers = (f"{share:.2f}", f"{tokens.unigram_entropy:.4f}", f"{bits:.3f}")
        table.add_row(tokenizer, f"{tokens.vocab_size:,}", f"{len(tokens.ids):,}", *numbers)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(__doc__, corpus, needs="config"))
