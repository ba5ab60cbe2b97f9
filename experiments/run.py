"""Train one config and write its row.

    python -m experiments.run experiments/configs/tiny.yaml dp.degree=2 train.steps=10
    torchrun --nproc-per-node 2 -m experiments.run experiments/configs/tiny.yaml
    python -m experiments.run results/rows/ROW.json          # again, from the config that a row stores

Without a launcher's environment it starts the ranks itself; under torchrun or srun it joins. A run with checkpoints
that gets SIGUSR1 or SIGTERM saves and ends with status 0; in a job of Slurm it queues that job again, so that
checkpoint.resume=auto goes on.
"""

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from functools import partial

from experiments.command import launch, main, read_config
from research.attempts import Failure, tell_failure
from research.config import RunConfig
from research.launch.environment import Joined
from research.launch.local import RankError
from research.record import Row, row_path
from research.sweep.evidence import last_line
from research.sweep.scheduler import requeue
from research.train.checkpoint.choice import OWN, folder_of, resumed_from, told_start, weights_from
from research.train.checkpoint.index import newest
from research.train.run import run


def train(words: Sequence[str], where: Joined | None) -> int:
    config = read_config(words, where)
    resumed = resumed_from(config, verify=where is None)
    weights = None if resumed else weights_from(config)
    if where is None or where.place.rank == 0:
        for line in told_start(config, resumed, weights):
            print(line, file=sys.stderr)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a notice before or after training is nothing to die of
    try:
        row = launch(partial(run, config), config, where)
    except Exception as error:
        tell_failure(_failure(error, where), config)
        raise
    if where is None or where.place.rank == 0:
        _report_stop(config, where) if row is None else _report(row, config)
    return 0


def _failure(error: Exception, where: Joined | None) -> Failure:
    """The rank that failed, as far as it is known, and the last line of its error."""
    if isinstance(error, RankError):
        return Failure(error.rank, last_line(str(error).splitlines()))
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    return Failure(where.place.rank if where else 0, last_line(lines))


def _report(row: Row, config: RunConfig) -> None:
    skipped = f", {row.skipped_steps} of {len(row.losses)} steps skipped" if row.skipped_steps else ""
    print(f"loss {row.loss:.4f}, unigram entropy of the corpus {row.unigram_entropy:.4f} nats a token{skipped}")
    print(row.speed + (f", {row.step_ms:.1f} ms a step" if row.timed_steps else ""))
    print(row_path(config.record.folder, row.run_id))
    if row.resumed_step:
        print(f"resumed after step {row.resumed_step} from {row.resumed_from}")
    if config.checkpoint.every:
        print(f"checkpoint {newest(folder_of(config))}")
    if row.eval_loss is not None:
        bits = "" if row.bits_per_byte is None else f", {row.bits_per_byte:.4f} bits a byte"
        print(f"held-out text: loss {row.eval_loss:.4f}, perplexity {row.perplexity:.4g}{bits}")


def _report_stop(config: RunConfig, where: Joined | None) -> None:
    """Ranks that a launcher started in a job are all that there is to the job; others may be one part of it."""
    print(f"asked to end, saved as {newest(folder_of(config))}; checkpoint.resume=auto goes on from there")
    job = os.environ.get("SLURM_JOB_ID") if where is not None and config.checkpoint.resume in OWN else None
    if job:
        print(requeue(job))


if __name__ == "__main__":
    sys.exit(main(__doc__, train, needs="config"))
