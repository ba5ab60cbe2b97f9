"""What the end of a run's process says of the run: its state, and how that is known."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from research.attempts import State

# Exceptions of Python, NumPy and torch, and the last words of allocators.
OUT_OF_MEMORY = re.compile(r"^[\w.]*(MemoryError|OutOfMemoryError)\b|CUDA out of memory|an't allocate memory|bad_alloc")
KILLED = signal.Signals.SIGKILL.name
RANK = re.compile(r"^\s*\d+: ")  # what `srun --label` puts before each line
ERROR = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b(:|$)")
TAIL_BYTES = 2**16


@dataclass(frozen=True)
class End:
    """How the process of a run ended."""

    code: int  # exit code; -n: killed by signal n
    has_row: bool
    error: str = ""  # last line of the first error
    limit_minutes: float = 0  # the limit that it ran past; 0: none
    asked: str = ""  # signal by which the sweep itself was ended
    saved_step: int = 0  # of the checkpoint with which it ended before its last step; 0: it did not
    oom_kills: int | None = None  # that the kernel counted meanwhile; None where it does not tell


def judge(end: End) -> tuple[State, str]:
    """State and evidence. Without a row nothing is done, whatever the exit code."""
    how = told(end.code)
    if end.has_row:
        return "done", "row written" if end.code == 0 else f"row written, then {how}"
    if end.limit_minutes:
        return "timed out", f"ran past its limit of {end.limit_minutes:g} min, {how}"
    if end.asked:
        return "cancelled", f"the sweep was ended by {end.asked}"
    if end.saved_step:
        return "cancelled", f"asked to end, saved after step {end.saved_step}"
    if OUT_OF_MEMORY.search(end.error):
        return "out of memory", f"{how}, an allocation failed"
    if KILLED in how or KILLED in end.error:
        what = how if KILLED in how else f"{how}, a rank was killed by {KILLED}"
        if end.oom_kills:
            some = "1 OOM kill" if end.oom_kills == 1 else f"{end.oom_kills} OOM kills"
            return "out of memory", f"{what}: the kernel counted {some} meanwhile"
        counted = "the kernel tells no OOM kills" if end.oom_kills is None else "no OOM kill was counted"
        return "failed", f"{what}: {counted}"
    return "failed", how if end.code else f"{how}, but there is no row"


def told(code: int) -> str:
    """The exit code, with the signal that it stands for (shells and srun add 128)."""
    number = -code if code < 0 else code - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"exit code {code}"
    return f"killed by {name}" if code < 0 else f"exit code {code} ({name})"


def last_error(output: Path) -> str:
    """The last line of the first traceback in what a run printed, else the last line of an error, else the last line.
    Only for errors that no rank could tell in better order."""
    if not output.exists():
        return ""
    with output.open("rb") as file:
        file.seek(max(0, output.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    lines = [text.rstrip() for text in lines if text.strip()]
    starts = [i for i, text in enumerate(lines) if "Traceback (most recent call last)" in text]
    for start in starts[:1]:
        label = RANK.match(lines[start])
        mine = [text for text in lines[start + 1 :] if not label or text.startswith(label[0])]
        told = [RANK.sub("", text) if label else text for text in mine]
        for i, text in enumerate(told):
            if not text.startswith(" "):  # where it announces a list, with the first entry
                return " ".join([text, *(t.strip() for t in told[i + 1 : i + 2] if text.endswith(":"))])
    return last_line([RANK.sub("", text) for text in lines])


def last_line(lines: Sequence[str]) -> str:
    """The last line that names an error, else the last one that says anything."""
    said = [text.strip() for text in lines if text.strip()]
    return next((text for text in reversed(said) if ERROR.match(text)), said[-1] if said else "")


def oom_kills(counters: Path = Path("/proc/vmstat")) -> int | None:
    """Processes that this kernel has killed for want of memory since it started."""
    try:
        found = re.search(r"^oom_kill (\d+)$", counters.read_text(), re.M)
    except OSError:
        return None
    return int(found[1]) if found else None
