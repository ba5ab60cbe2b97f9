"""Prove that a layout computes what one process computes, in float64.

    python -m experiments.verify experiments/configs/tiny.yaml dp.degree=4 train.recompute=full

Runs the layout and one process on the same global batches and compares the loss, every parameter's gradient, the
gradient norm and the weights after the optimizer steps. Exit status 1 past the tolerance.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from experiments.command import main, read_config
from research import config as configs
from research.launch.environment import Joined
from research.mesh import total_ranks
from research.problems import ConfigError, Problem
from research.train.proof import TOLERANCE, compare, reference_of, snapshots, worst_by_kind

OFFENDERS = 8  # listed by name


def verify(words: Sequence[str], where: Joined | None) -> int:
    if where is not None:
        raise ConfigError([Problem("experiments.verify", None, "starts its own ranks", "without torchrun or srun")])
    config = read_config(words)
    if config.train.dtype != "float64":
        print(f"train.dtype={config.train.dtype}: the proof runs in float64")
        config = configs.replace(config, {"train.dtype": "float64"})
    if config.dp.grad_dtype != "float32":
        print(f"dp.grad_dtype={config.dp.grad_dtype}: gradients are summed in float64 as well")
        config = configs.replace(config, {"dp.grad_dtype": "float32"})
    if config == reference_of(config):
        print("this layout is the one process that others are held against: nothing to prove; give a degree")
        return 2
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        reference = next(snapshots(reference_of(config), Path(folder, "one")))
        findings = compare(reference, snapshots(config, Path(folder, "layout")))
    table = Table("compared", "worst relative error", "where", "", title=f"{total_ranks(config)} ranks against one")
    for f in worst_by_kind(findings):
        table.add_row(f.what, f"{f.error:.1e}", f.name, "pass" if f.passed else "FAIL")
    Console().print(table)
    failed = [f for f in findings if not f.passed]
    for f in failed[:OFFENDERS]:
        print(f"{f.what} of {f.name} is off by {f.error:.1e}, tolerance {TOLERANCE:g}", file=sys.stderr)
    if len(failed) > OFFENDERS:
        print(f"and {len(failed) - OFFENDERS} more of {len(findings)} quantities", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(__doc__, verify, needs="config"))
