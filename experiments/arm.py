"""One run of an ablation inside a job: what `slurm/ablate.sbatch` starts on the first node.

    python -m experiments.arm FOLDER COMMAND ...

FOLDER is that of the run in `results/attempts`; COMMAND starts its ranks, which write the row. The state of the run,
with the evidence for it, is kept in FOLDER/attempt.json.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from research.attempts import BAD
from research.sweep.keep import Notice, keep


def job_of(environment: Mapping[str, str]) -> str:
    """As squeue writes it: `12_3` for an element of an array."""
    if "SLURM_ARRAY_JOB_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment.get("SLURM_JOB_ID", "")


def main(words: Sequence[str]) -> int:
    if len(words) < 2:
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    folder = Path(words[0])
    with Notice() as notice:
        attempt = keep(folder, words[1:], job_of(os.environ), tick=notice.check)
    if attempt is None:
        print(f"{folder.name}: another process is at it")
        return 0
    print(f"{folder.name}: {attempt.reason}")
    return 1 if attempt.state in BAD else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
