"""Where every run of an ablation stands, by what can be seen of it, and which are to be run."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from research import attempts
from research.attempts import BAD, OPEN, Attempt, State, claimed, folder_of
from research.config import RunConfig
from research.record import run_id
from research.sweep.keep import has_row
from research.sweep.scheduler import Record, Unreachable, records

RETRY: dict[str, tuple[State, ...]] = {"failed": BAD, "out-of-memory": ("out of memory",), "timed-out": ("timed out",)}


def standing(runs: Iterable[RunConfig]) -> dict[str, Attempt]:
    """The attempt of every run as it stands now, by run_id; what has changed is written down."""
    found = {folder_of(c): attempts.read(folder_of(c)) or attempts.new(c) for c in runs}
    return {a.run_id: a for a in _refreshed(found)}


def attempts_in(results: str | Path, ablation: str) -> list[Attempt]:
    """Those of an ablation that left anything in a results folder, as they stand now."""
    found = {Path(results) / "attempts" / a.run_id: a for a in attempts.load(results) if a.ablation == ablation}
    return list(_refreshed(found))


def _refreshed(found: Mapping[Path, Attempt]) -> Iterator[Attempt]:
    known = _known([a.job for a in found.values() if a.state in OPEN and a.job])
    return (_now(attempt, folder, known) for folder, attempt in found.items())


def _known(jobs: Sequence[str]) -> Mapping[str, Record] | None:
    """None where the scheduler cannot be asked, as from another machine."""
    try:
        return records(jobs) if jobs else {}
    except Unreachable:
        return None


def _now(attempt: Attempt, folder: Path, known: Mapping[str, Record] | None) -> Attempt:
    if has_row(attempt, folder):
        return dataclasses.replace(attempt, state="done", error="", evidence=attempt.evidence or "row written")
    if attempt.state == "done":
        return dataclasses.replace(attempt, state="pending", evidence="", job="")  # its row was removed
    if attempt.state not in OPEN or not (attempt.job or attempt.state == "running"):
        return attempt
    with claimed(folder) as lock:
        if lock is None:
            return dataclasses.replace(attempt, state="running")
        last = attempts.read(folder) or attempt
        if last.state not in OPEN or has_row(last, folder):  # it has ended since
            return _now(last, folder, known)
        changed = _without_process(last, known)
        if changed != last:
            attempts.write(changed, folder)
        return changed


def _without_process(attempt: Attempt, known: Mapping[str, Record] | None) -> Attempt:
    """Nobody here holds it: it is with the scheduler, or it is no more."""
    if attempt.job:
        if known is None:
            return attempt
        record = known.get(attempt.job)
        if record is None:
            gone = f"Slurm knows nothing of job {attempt.job} any more, and there is no row"
            return dataclasses.replace(attempt, state="cancelled", evidence=gone, ended=attempts.now())
        ended = "" if record.as_state in OPEN else attempts.now()
        return dataclasses.replace(attempt, state=record.as_state, evidence=str(record), ended=ended)
    if attempt.state == "running":
        gone = f"its processes on {attempt.host} ended without a word"
        return dataclasses.replace(attempt, state="cancelled", evidence=gone, ended=attempts.now())
    return attempt


def to_do(runs: Iterable[RunConfig], stand: Mapping[str, Attempt], retry: str = "") -> Iterator[RunConfig]:
    """Those that wait for nobody: never tried, or cancelled; with `retry` also those that ended badly."""
    again = RETRY.get(retry, ())
    for config in runs:
        attempt = stand[run_id(config)]
        if attempt.state in ("cancelled", *again) or (attempt.state == "pending" and not attempt.job):
            yield config


def prepared(config: RunConfig) -> Path:
    """The folder of a run that is to be tried, made where it is missing."""
    folder = folder_of(config)
    if attempts.read(folder) is None:
        attempts.write(attempts.new(config), folder)
    return folder
