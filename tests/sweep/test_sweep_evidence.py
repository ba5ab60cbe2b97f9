"""From the end of a process to a state with evidence."""

from pathlib import Path

import pytest

from research.sweep.evidence import End, judge, last_error, last_line, oom_kills, told


@pytest.mark.parametrize(
    ("end", "state", "evidence"),
    [
        (End(0, True), "done", "row written"),
        (End(134, True), "done", "row written, then exit code 134 (SIGABRT)"),
        (End(0, False), "failed", "exit code 0, but there is no row"),
        (End(1, False, "ValueError: x"), "failed", "exit code 1"),
        (End(2, False), "failed", "exit code 2"),
        (End(-11, False), "failed", "killed by SIGSEGV"),
        (End(139, False), "failed", "exit code 139 (SIGSEGV)"),
        (End(1, False, "MemoryError"), "out of memory", "exit code 1, an allocation failed"),
        (
            End(1, False, "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8.00 GiB for an array"),
            "out of memory",
            "exit code 1, an allocation failed",
        ),
        (
            End(1, False, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
            "out of memory",
            "exit code 1, an allocation failed",
        ),
        (
            End(
                1,
                False,
                "RuntimeError: [enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory",
            ),
            "out of memory",
            "exit code 1, an allocation failed",
        ),
        (End(1, False, "ValueError: no MemoryError: 3"), "failed", "exit code 1"),
        (End(-9, False, oom_kills=2), "out of memory", "killed by SIGKILL: the kernel counted 2 OOM kills meanwhile"),
        (End(-9, False, oom_kills=0), "failed", "killed by SIGKILL: no OOM kill was counted"),
        (End(137, False), "failed", "exit code 137 (SIGKILL): the kernel tells no OOM kills"),
        (
            End(1, False, "killed by SIGKILL", oom_kills=1),
            "out of memory",
            "exit code 1, a rank was killed by SIGKILL: the kernel counted 1 OOM kill meanwhile",
        ),
        (End(-15, False, limit_minutes=30), "timed out", "ran past its limit of 30 min, killed by SIGTERM"),
        (End(130, False, asked="SIGINT"), "cancelled", "the sweep was ended by SIGINT"),
        (End(0, False, saved_step=12), "cancelled", "asked to end, saved after step 12"),
        (End(0, True, saved_step=12), "done", "row written"),
    ],
)
def test_judgement(end: End, state: str, evidence: str) -> None:
    assert judge(end) == (state, evidence)


def test_codes_of_signals() -> None:
    assert [told(c) for c in (0, 1, -15, 143, 255)] == [
        *("exit code 0", "exit code 1", "killed by SIGTERM"),
        *("exit code 143 (SIGTERM)", "exit code 255"),
    ]


TRACEBACK = """\
Traceback (most recent call last):
  File "a.py", line 3, in f
    g()
ValueError: the cause
"""
LABELLED = """\
1: starting
1: Traceback (most recent call last):
0: Traceback (most recent call last):
0:   File "b.py", line 1
1:   File "a.py", line 3, in f
0: RuntimeError: Connection closed by peer
1: ValueError: the cause
srun: error: n1: task 1: Exited with exit code 1
slurmstepd: error: *** STEP 3.0 ON n1 CANCELLED ***
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (TRACEBACK + "another line\n", "ValueError: the cause"),
        (LABELLED, "ValueError: the cause"),
        (f"rank 2 failed first:\n{TRACEBACK}", "ValueError: the cause"),
        ("2 problems in the config:\n  - train.lr=x is not a number\n", "- train.lr=x is not a number"),
        ("rank 1 failed first:\nkilled by SIGKILL\n", "killed by SIGKILL"),
        ("some.module.OddError: x\nand more words\n", "some.module.OddError: x"),
        ("", ""),
        ("\n \n", ""),
    ],
)
def test_last_error_of_an_output(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "output.txt").write_text(text)
    assert last_error(tmp_path / "output.txt") == line


def test_last_error_of_a_long_or_odd_output(tmp_path: Path) -> None:
    path = tmp_path / "output.txt"
    assert last_error(path) == ""
    path.write_bytes(b"\xff\xfe\n" + b"step\n" * 10**5 + TRACEBACK.encode())
    assert last_error(path) == "ValueError: the cause"


def test_last_error_that_announces_a_list_has_its_first_entry(tmp_path: Path) -> None:
    path = tmp_path / "output.txt"
    told = "research.problems.ConfigError: 1 problem in the config:\n  a.jsonl line 2 has no text\nmore\n"
    path.write_text(f"Traceback (most recent call last):\n  File x\n{told}")
    assert last_error(path) == "research.problems.ConfigError: 1 problem in the config: a.jsonl line 2 has no text"


def test_last_line_prefers_the_one_that_names_an_error() -> None:
    assert last_line(["KeyError: 3", "Compile with `TORCH_USE_CUDA_DSA`"]) == "KeyError: 3"
    assert last_line(["a", "", "b "]) == "b" and last_line([]) == ""


def test_the_kernel_counts(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("pgfault 1\noom_kill 7\nx 3\n")
    assert oom_kills(tmp_path / "vmstat") == 7
    assert oom_kills(tmp_path / "nothing") is None
    (tmp_path / "vmstat").write_text("pgfault 1\n")
    assert oom_kills(tmp_path / "vmstat") is None
