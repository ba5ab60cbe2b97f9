"""Run the arms of an ablation that have no row yet, on this machine, and write its tables.

    python -m experiments.ablate experiments/ablations/quickstart.yaml
    python -m experiments.ablate experiments/ablations/quickstart.yaml train.steps=40 record.folder=results/short

Words after the file change every arm. All arms are checked before the first one runs.
"""

import sys
from collections.abc import Sequence
from functools import partial

from experiments.command import CHECKS, launch, main
from experiments.tables import show
from research.ablation import missing, read, runs
from research.config import ConfigError, Problem
from research.launch.environment import Joined
from research.launch.local import RankError
from research.mesh import total_ranks
from research.train.run import run


def ablate(words: Sequence[str], where: Joined | None) -> int:
    if where is not None:
        raise ConfigError([Problem("experiments.ablate", None, "starts its own ranks", "without torchrun or srun")])
    ablation = read(words[0])
    configs = runs(ablation, words[1:], CHECKS)
    todo = list(missing(configs))
    print(f"{ablation.name}: {ablation.question}\nprediction: {ablation.prediction}")
    print(f"{len(configs)} runs, {len(configs) - len(todo)} have their row, {len(todo)} to do")
    failed = []
    for number, config in enumerate(todo, 1):
        name = f"{config.record.arm}, seed {config.train.seed}"
        print(f"[{number}/{len(todo)}] {name}: {total_ranks(config)} ranks", flush=True)
        try:
            row = launch(partial(run, config), config, where)
            print(f"    loss {row.loss:.4f}, {row.tokens_per_s:,.0f} tokens/s, {row.wall_s:.0f} s", flush=True)
        except (RankError, ConfigError) as error:
            failed.append(name)
            print(f"    failed: {error}", file=sys.stderr, flush=True)
    if len(failed) < len(configs):
        try:
            show(configs[0].record.folder, ablation.name)
        except ValueError as error:  # a file among the rows that is none
            print(error, file=sys.stderr)
            return 1
    if failed:
        print(f"{len(failed)} of {len(configs)} runs failed: {'; '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(__doc__, ablate, needs="ablation"))
