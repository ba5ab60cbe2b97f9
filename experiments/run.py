"""Train one config and write its row.

    python -m experiments.run experiments/configs/tiny.yaml dp.degree=2 train.steps=10
    torchrun --nproc-per-node 2 -m experiments.run experiments/configs/tiny.yaml
    python -m experiments.run results/rows/ROW.json          # again, from the config that a row stores

Without a launcher's environment it starts the ranks itself; under torchrun or srun it joins.
"""

import sys
from collections.abc import Sequence
from functools import partial

from experiments.command import launch, main, read_config
from research.launch.environment import Joined
from research.record import row_path
from research.train.checkpoint.choice import changed_since, folder_of, resumed_from, weights_from
from research.train.checkpoint.index import newest
from research.train.run import run


def train(words: Sequence[str], where: Joined | None) -> int:
    config = read_config(words, where)
    source = resumed_from(config) or weights_from(config)
    if source is not None and (where is None or where.place.rank == 0):
        changed = [f"\n  {line}" for line in changed_since(config, source)]
        print(f"starts from {source}{''.join(changed)}", file=sys.stderr)
    row = launch(partial(run, config), config, where)
    if where is None or where.place.rank == 0:
        skipped = f", {row.skipped_steps} of {len(row.losses)} steps skipped" if row.skipped_steps else ""
        print(f"loss {row.loss:.4f}, unigram entropy of the corpus {row.unigram_entropy:.4f} nats a token{skipped}")
        print(f"{row.tokens_per_s:,.0f} tokens/s, {row.step_ms:.1f} ms a step")
        print(row_path(config.record.folder, row.run_id))
        if row.resumed_step:
            print(f"resumed after step {row.resumed_step} from {row.resumed_from}")
        if config.checkpoint.every:
            print(f"checkpoint {newest(folder_of(config))}")
        if row.eval_loss is not None:
            bits = "" if row.bits_per_byte is None else f", {row.bits_per_byte:.4f} bits a byte"
            print(f"held-out text: loss {row.eval_loss:.4f}, perplexity {row.perplexity:.4g}{bits}")
    return 0


if __name__ == "__main__":
    sys.exit(main(__doc__, train, needs="config"))
