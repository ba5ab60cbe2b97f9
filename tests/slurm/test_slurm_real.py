"""Jobs on a real Slurm: a sweep as arrays, two nodes, a time limit, failures, and a run that is stopped and goes on."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from research.attempts import Attempt, Progress, load, progress_of
from research.record import Row
from research.record import load as load_rows
from tests.slurm.cluster import ROOT, Cluster, why_not

LIMIT_S = 240
STEPS = 40  # of the run that is stopped half-way
TWO = "dp.degree=2"
ARRAY = {
    "dp2": [TWO],
    "tp2": ["tp.degree=2"],
    "pieces": [TWO, "train.microbatches=4"],
    "dense": [TWO, "model.experts=0"],
}
OTHERS = {
    "breaks": [TWO, "train.lr=1e300"],
    "two_nodes": [TWO, "slurm.nodes=2"],
    "endless": ["train.steps=1000000", "slurm.minutes=30"],
    "stopped": [TWO, f"train.steps={STEPS}", "checkpoint.every=1000"],
    "held": ["slurm.options=[--hold]"],
}

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)
pytestmark = pytest.mark.timeout(2 * LIMIT_S)


@dataclass(frozen=True)
class Sweep:
    """A submitted ablation, and a job of its own, on a cluster."""

    cluster: Cluster
    folder: Path
    torchrun: str  # the id of that job
    said: str  # what submitting printed

    @property
    def results(self) -> Path:
        return self.folder / "results"

    def ablate(self, *words: str) -> subprocess.CompletedProcess[str]:
        return ablate(self.cluster, self.folder, *words)

    def attempt(self, arm: str) -> Attempt:
        return next(a for a in load(self.results) if a.arm == arm)

    def row(self, arm: str) -> Row:
        (row,) = (r for r in load_rows(self.results) if r.arm == arm)
        return row

    def progress(self, arm: str) -> Progress:
        return progress_of(self.results / "attempts" / self.attempt(arm).run_id)

    def printed(self, arm: str) -> str:
        attempt = self.attempt(arm)
        folder = self.results / "attempts"
        paths = (folder / f"slurm-{attempt.job}.out", folder / attempt.run_id / "output.txt")
        return "\n".join(p.read_text(errors="replace") for p in paths if p.exists())

    def trains(self, arm: str) -> None:
        self.cluster.until(lambda: self.progress(arm).step > 0, LIMIT_S, lambda: self.printed(arm))

    def ended(self, arm: str) -> str:
        return self.cluster.ended(self.attempt(arm).job, LIMIT_S)


def ablate(cluster: Cluster, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "experiments.ablate", str(folder / "axes.yaml"), *words]
    return subprocess.run(
        command, cwd=ROOT, env=cluster.environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sweep]:
    """Everything is submitted at once; each test waits for its own."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "text.txt").write_text("".join(f"line {i} of a small text, {i * i} squared\n" for i in range(200)))
    base = yaml.safe_load((ROOT / "experiments" / "configs" / "tiny.yaml").read_text())
    base["train"] |= {"steps": 3, "warmup_steps": 1, "dtype": "float32"}
    base["data"] |= {"path": str(folder / "text.txt"), "cache": str(folder / "cache")}
    base["record"] = {"folder": str(folder / "results")}
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    told = {"question": "Do jobs run?", "prediction": "They do.", "base": "base.yaml", "seeds": [0]}
    (folder / "axes.yaml").write_text(json.dumps(told | {"arms": ARRAY | OTHERS}))
    options = ["--nodes=2", "--ntasks-per-node=1", f"--output={folder / 'torchrun.out'}"]
    with Cluster() as cluster:
        words = ["slurm/train.sbatch", str(folder / "base.yaml"), TWO]
        torchrun = cluster.run("sbatch", "--parsable", *options, *words, LAUNCHER="torchrun")
        submitted = ablate(cluster, folder, "--submit")
        assert submitted.returncode == 0, submitted.stderr
        made = Sweep(cluster, folder, torchrun, submitted.stdout)
        cluster.run("scancel", made.attempt("held").job)
        made.trains("stopped")
        cluster.run("scancel", "--signal=USR1", made.attempt("stopped").job)  # as Slurm does ahead of a time limit
        made.trains("endless")
        # Limits are whole minutes, looked at twice a minute; a time that has passed once it is read is refused.
        cluster.run("scontrol", "update", f"JobId={made.attempt('endless').job}", "EndTime=now+5")
        yield made


def test_an_array_of_arms_with_two_ranks_each(sweep: Sweep) -> None:
    jobs = dict(re.findall(r"^(\w+), seed 0: job (\w+), ", sweep.said, re.M))
    array = {jobs[arm].partition("_")[0] for arm in (*ARRAY, "breaks")}
    assert len(array) == 1 and len(set(jobs.values())) == len(ARRAY | OTHERS)  # arms that ask alike share an array
    for arm in ARRAY:
        assert sweep.ended(arm) == "COMPLETED", sweep.printed(arm)
        assert (sweep.row(arm).hardware.ranks, sweep.row(arm).hardware.nodes) == (2, 1)
        assert sweep.attempt(arm).state == "done" and sweep.attempt(arm).job == jobs[arm]
    meetings = [re.search(r"meeting at (\S+)", sweep.printed(arm)) for arm in ARRAY]
    assert len({m[1] for m in meetings if m}) == len(ARRAY)  # neighbours on one node have ports of their own


def test_ranks_on_two_nodes_by_srun(sweep: Sweep) -> None:
    assert sweep.ended("two_nodes") == "COMPLETED", sweep.printed("two_nodes")
    assert (sweep.row("two_nodes").hardware.ranks, sweep.row("two_nodes").hardware.nodes) == (2, 2)
    assert sweep.row("two_nodes").losses == pytest.approx(sweep.row("dp2").losses, abs=1e-5)


def test_ranks_on_two_nodes_by_torchrun(sweep: Sweep) -> None:
    state = sweep.cluster.ended(sweep.torchrun, LIMIT_S)
    assert state == "COMPLETED", (sweep.folder / "torchrun.out").read_text()
    assert (sweep.row("").hardware.ranks, sweep.row("").hardware.nodes) == (2, 2)
    assert sweep.row("").losses == pytest.approx(sweep.row("dp2").losses, abs=1e-5)


def test_a_run_that_gets_notice_saves_is_queued_again_and_goes_on(sweep: Sweep) -> None:
    job = sweep.attempt("stopped").job
    sweep.cluster.until(lambda: sweep.attempt("stopped").tries == 2, LIMIT_S, lambda: sweep.printed("stopped"))
    assert sweep.ended("stopped") == "COMPLETED", sweep.printed("stopped")
    assert sweep.cluster.field(job, "Restarts") == "1"
    row = sweep.row("stopped")
    assert 0 < row.resumed_step < STEPS and len(row.losses) == STEPS and row.losses[-1] < row.losses[0]
    assert sweep.attempt("stopped").state == "done"


def test_what_went_wrong_is_told_with_its_evidence(sweep: Sweep) -> None:
    assert sweep.ended("breaks") == "FAILED" and sweep.ended("endless") == "TIMEOUT"
    done = sweep.ablate("--limit", "0")
    assert done.returncode == 1 and "2 of 9 runs failed" in done.stderr
    breaks, held, late = (sweep.attempt(arm) for arm in ("breaks", "held", "endless"))
    assert (breaks.state, held.state, late.state) == ("failed", "cancelled", "timed out")
    assert breaks.error.startswith("FloatingPointError: step 1") and "exit code" in breaks.evidence
    assert "TIMEOUT" in late.evidence and "Slurm knows nothing of job" in held.evidence  # cancelled before it began
    for arm in ("breaks", "held", "endless"):
        assert f"{arm}: {sweep.attempt(arm).reason}." in done.stdout  # a footnote of the table


def test_nothing_is_submitted_twice(sweep: Sweep) -> None:
    again = sweep.ablate("--submit", "--only", ",".join((*ARRAY, "breaks", "endless")))
    assert again.returncode == 0 and ", 0 to do" in again.stdout and ": job " not in again.stdout
