"""What Slurm has on record of jobs, and jobs for the runs of a sweep."""

import contextlib
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from research.attempts import State

ASK_S = 30.0  # after which a controller counts as out of reach
STATES: dict[State, tuple[str, ...]] = {
    "pending": ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"),
    "running": ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"),
    "timed out": ("TIMEOUT", "DEADLINE"),
    "out of memory": ("OUT_OF_MEMORY",),
    "cancelled": ("CANCELLED", "PREEMPTED", "REVOKED"),
}


class Unreachable(RuntimeError):
    """No Slurm here, or none that answers: nothing is known about its jobs."""


@dataclass(frozen=True)
class Record:
    """What the scheduler says of one job or one element of an array."""

    state: str  # in Slurm's words
    exit_code: str = ""  # code:signal
    reason: str = ""
    source: str = "scontrol"

    @property
    def as_state(self) -> State:
        """COMPLETED too is a failure of a run that left no row."""
        return next((ours for ours, theirs in STATES.items() if self.state in theirs), "failed")

    def __str__(self) -> str:
        said = [self.state, *([f"exit code {self.exit_code}"] if self.exit_code else [])]
        said += [self.reason] if self.reason not in ("", "None") else []
        return f"{self.source}: {', '.join(said)}"


def records(jobs: Iterable[str]) -> dict[str, Record]:
    """By job id, `12` or `12_3`; without those of which nothing is known any more, such as an element that was
    cancelled before it began. What the controller still holds counts, then accounting where there is any. Raises
    Unreachable where no controller answers."""
    wanted = set(jobs)
    found: dict[str, Record] = {}
    for array in sorted({job.partition("_")[0] for job in wanted}):
        found |= dict(_shown(_ask(["scontrol", "show", "job", "--oneliner", array], unless="Invalid job id")))
    if missing := sorted(wanted - set(found)):
        fields = "JobID,State,ExitCode"
        command = ["sacct", "--allocations", "--noheader", "--parsable2", f"--format={fields}", "--jobs"]
        with contextlib.suppress(Unreachable):
            found |= dict(_accounted(_ask([*command, ",".join(missing)])))
    return {job: record for job, record in found.items() if job in wanted}


def _ask(command: Sequence[str], unless: str = "") -> str:
    """What a command prints; "" where it fails with the words `unless`. Raises Unreachable where it fails otherwise."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unreachable(f"{command[0]}: {error}") from error
    if done.returncode and not (unless and unless in done.stderr):
        raise Unreachable(f"{command[0]}: {done.stderr.strip()}")
    return "" if done.returncode else done.stdout


def _shown(text: str) -> Iterator[tuple[str, Record]]:
    """Records of `scontrol show job`, in which waiting elements of an array share a line."""
    for line in text.splitlines():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        if "JobState" not in fields:
            continue
        record = Record(fields["JobState"], fields.get("ExitCode", ""), fields.get("Reason", ""))
        for index in _indices(fields.get("ArrayTaskId", "")):
            yield f"{fields['ArrayJobId']}_{index}", record
        yield fields["JobId"], record


def _indices(text: str) -> Iterator[int]:
    """`3`, or `0-2,5%2` of elements that wait."""
    for part in text.partition("%")[0].split(","):
        if match := re.fullmatch(r"(\d+)(?:-(\d+))?", part):
            yield from range(int(match[1]), int(match[2] or match[1]) + 1)


def _accounted(text: str) -> Iterator[tuple[str, Record]]:
    for line in text.splitlines():
        job, state, exit_code = line.split("|")[:3]
        yield job, Record(state.split()[0], exit_code, source="sacct")  # "CANCELLED by 1000"


def submit(options: Sequence[str], script: str, words: Sequence[str]) -> str:
    """The id of a new job. Raises Unreachable where Slurm does not take it, with its own words."""
    return _ask(["sbatch", "--parsable", *options, script, *words]).strip().partition(";")[0]


def requeue(job: str) -> str:
    """Queue a job again that is about to be stopped, and say so. One that is ending already, as it was cancelled or has
    reached its limit, is left alone."""
    try:
        record = records([job]).get(job)
        if record is None or record.state != "RUNNING":
            return f"job {job} is not queued again ({record or 'unknown to scontrol'})"
        _ask(["scontrol", "requeue", job])
    except Unreachable as error:
        return f"job {job} could not be queued again: {error}"
    return f"job {job} is queued again"
