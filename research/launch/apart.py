"""An entry point as a process of its own, for a notebook: a kernel runs threads, so no rank may be forked from it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]  # of the checkout: relative paths in the words start here
GRACE_S = 10.0  # in which an entry point that is told to end takes its ranks with it


def entry_point(name: str, *words: str, limit_s: float = 300.0) -> str:
    """What `python -m experiments.NAME WORDS` prints, with the numbers that it has at a terminal.

    Raises RuntimeError with its errors where it fails, TimeoutError past `limit_s`. An interrupted cell ends it,
    too. No process is left.
    """
    plain = ["env", "-u", "FORCE_COLOR"]  # which kernels set: their own output is not the terminal's
    command = [*plain, sys.executable, "-m", f"experiments.{name}", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, err = process.communicate(timeout=limit_s)
        except BaseException as error:
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
            if isinstance(error, subprocess.TimeoutExpired):
                raise TimeoutError(f"experiments.{name} is not done after {limit_s:g} s") from None
            raise
    if process.returncode:
        told = err.strip() or out.strip()
        raise RuntimeError(f"experiments.{name} failed, exit status {process.returncode}:\n{told}")
    return out
