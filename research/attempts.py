"""What became of a run that a sweep started, row or not: `FOLDER/attempts/<run_id>/`.

- attempt.json: the config, the state, and the evidence for it; `python -m experiments.run` takes it as a config
- lock: held by the processes of the run, so that the kernel knows whether it still goes on
- progress.json: step, loss and speed, while it runs
- error.json: the first error that a rank told
- output.txt: what it printed
"""

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from research.config import RunConfig, Value
from research.files import write_atomically
from research.problems import ConfigError, Problem
from research.record import run_id
from research.settings import to_mapping

State = Literal["pending", "running", "done", "failed", "out of memory", "timed out", "cancelled", "impossible"]
STATES: tuple[State, ...] = get_args(State)
BAD: tuple[State, ...] = ("failed", "out of memory", "timed out")  # tried, and not tried again unless asked for
OPEN: tuple[State, ...] = ("pending", "running")


@dataclass(frozen=True)
class Attempt:
    """The state of a run, of which the last try counts."""

    run_id: str
    ablation: str
    arm: str
    seed: int
    repeat: int
    config: dict[str, dict[str, Value]]
    state: State = "pending"
    evidence: str = ""  # how the state is known: exit code, signal, what the scheduler has on record
    error: str = ""  # the last line of the first error
    tries: int = 0
    host: str = ""
    job: str = ""  # of Slurm, `<array>_<index>`; "" on this machine
    started: str = ""  # UTC, ISO 8601
    ended: str = ""

    @property
    def reason(self) -> str:
        """Why there is no row, in a line: `failed: ValueError: .. (exit code 1)`."""
        return reason(self.state, self.error, self.evidence)


def reason(state: State, error: str, evidence: str) -> str:
    if state == "pending" and not evidence:
        return "has not run"
    return state + (f": {error}" if error else "") + (f" ({evidence})" if evidence else "")


@dataclass(frozen=True)
class Progress:
    """How far a run is. Read by people only."""

    step: int = 0  # made
    steps: int = 0  # wanted
    loss: float | None = None
    tokens_per_s: float | None = None
    saved: bool = False  # it was asked to end, and has a checkpoint of this step


@dataclass(frozen=True)
class Failure:
    """The last line of a rank's error."""

    rank: int
    line: str


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def folder_of(config: RunConfig) -> Path:
    return Path(config.record.folder) / "attempts" / run_id(config)


def new(config: RunConfig) -> Attempt:
    r = config.record
    return Attempt(run_id(config), r.ablation, r.arm, config.train.seed, r.repeat, to_mapping(config))


def write(attempt: Attempt, folder: Path) -> None:
    write_atomically(folder / "attempt.json", json.dumps(dataclasses.asdict(attempt), indent=1).encode())


def read(folder: Path) -> Attempt | None:
    """None where no sweep has started it. Raises ConfigError naming a file that is no attempt."""
    path = folder / "attempt.json"
    tree = _get(path)
    if tree is None:
        return None
    names = {f.name for f in dataclasses.fields(Attempt)}
    if not isinstance(tree, dict) or set(tree) != names or tree["state"] not in STATES:
        raise ConfigError([Problem(str(path), None, "is no attempt of this version", f"remove {folder}")])
    return Attempt(**tree)


def load(folder: str | Path) -> list[Attempt]:
    """All attempts of a results folder, by run_id."""
    found = (read(p) for p in sorted((Path(folder) / "attempts").glob("*/")))
    return [a for a in found if a is not None]


def tell(progress: Progress, config: RunConfig) -> None:
    """Only where a sweep watches: it has made the folder."""
    if (folder := folder_of(config)).is_dir():
        draft = folder / ".progress"  # of one rank; it need not outlive a power failure, so no step waits for the disk
        draft.write_text(json.dumps(dataclasses.asdict(progress)), encoding="utf-8")
        draft.replace(folder / "progress.json")


def progress_of(folder: Path) -> Progress:
    return Progress(**(_get(folder / "progress.json") or {}))


def tell_failure(failure: Failure, config: RunConfig) -> None:
    """Only where a sweep watches, and only the first: what other ranks say later follows from it."""
    if (folder := folder_of(config)).is_dir():
        draft = folder / f".error.{failure.rank}.{os.getpid()}"
        draft.write_text(json.dumps(dataclasses.asdict(failure)), encoding="utf-8")
        with contextlib.suppress(FileExistsError):
            os.link(draft, folder / "error.json")
        draft.unlink()


def failure_of(folder: Path) -> Failure | None:
    tree = _get(folder / "error.json")
    return Failure(**tree) if tree else None


def forget_try(folder: Path) -> None:
    """Before another try."""
    for name in ("progress.json", "error.json"):
        (folder / name).unlink(missing_ok=True)


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[int | None]:
    """The handle of the run's lock; None where another process holds it. Whoever inherits the handle holds it as well,
    and the kernel lets go when the last of them has ended, however that was: no claim outlives its run."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        yield handle
    finally:
        os.close(handle)


def _get(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError([Problem(str(path), None, f"cannot be read: {error}")]) from error
