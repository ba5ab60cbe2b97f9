"""A notice to one rank, or to the launcher: all ranks save and end after the same step; the run goes on unchanged."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from research import attempts, settings
from research.config import RunConfig
from research.launch.local import RankError, start
from research.launch.preemption import asked_to_end
from research.mesh import total_ranks
from research.record import load
from research.train.checkpoint.choice import folder_of
from research.train.checkpoint.index import complete
from research.train.loop import Trainer
from research.train.run import run

TINY = Path(__file__).parents[2] / "experiments" / "configs" / "tiny.yaml"
STEPS = 60
LIMIT_S = 100


@pytest.fixture
def config(tmp_path: Path, text: Path) -> RunConfig:
    words = [f"data.path={text}", f"data.cache={tmp_path / 'cache'}", "data.sequence=16", "model.layers=2"]
    words += [f"train.steps={STEPS}", "train.global_batch=4", "train.microbatches=1", "train.warmup_steps=2"]
    words += ["dp.degree=2", "tp.degree=2", "checkpoint.every=1000", "checkpoint.resume=auto", "launch.threads=1"]
    return settings.load(TINY, [*words, f"record.folder={tmp_path / 'results'}"])


def forked(config: RunConfig, folder: Path) -> int:
    """A launcher as a process of its own: status 0 with a row, 3 if the run ended early, 1 if a rank failed. Each rank
    leaves its process id in the folder."""

    def told(*where: object) -> object:
        (folder / f"rank{where[0].rank}").write_text(str(os.getpid()))  # type: ignore[attr-defined]
        return run(config, *where)  # type: ignore[arg-type]

    attempts.folder_of(config).mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            row = start(told, total_ranks(config), config.launch, LIMIT_S, heeds=config.checkpoint.every > 0)[0]
            status = 3 if row is None else 0
        except RankError:
            status = 1
        except SystemExit as left:
            status = int(left.code or 0)
        finally:
            os._exit(status)
    return pid


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def trains(config: RunConfig) -> bool:
    return attempts.progress_of(attempts.folder_of(config)).step > 0


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize(
    ("number", "to"), [(signal.SIGUSR1, "rank2"), (signal.SIGUSR1, "launcher"), (signal.SIGTERM, "launcher")]
)
def test_all_ranks_save_after_the_same_step_and_go_on(config: RunConfig, tmp_path: Path, number: int, to: str) -> None:
    pid = forked(config, tmp_path)
    until(lambda: trains(config))
    os.kill(pid if to == "launcher" else int((tmp_path / to).read_text()), number)
    assert ended(pid) == 3
    (saved,) = complete(folder_of(config))
    progress = attempts.progress_of(attempts.folder_of(config))
    assert progress.saved and saved.name == f"step-{progress.step:08d}" and 0 < progress.step < STEPS
    assert load(tmp_path / "results") == []  # a run that is not over has no row
    attempts.forget_try(attempts.folder_of(config))
    assert ended(forked(config, tmp_path)) == 0
    (row,) = load(tmp_path / "results")
    assert row.resumed_step == progress.step and len(row.losses) == STEPS
    if to == "rank2":  # once is enough
        whole = settings.load(
            None,
            [
                *settings.to_words(config),
                "checkpoint.every=0",
                "checkpoint.resume=''",
                f"record.folder={tmp_path / 'whole'}",
            ],
        )
        assert ended(forked(whole, tmp_path)) == 0
        assert load(tmp_path / "whole")[0].losses == row.losses


def test_a_run_that_cannot_save_does_not_heed(config: RunConfig, tmp_path: Path) -> None:
    """SIGUSR1 means nothing to it, SIGTERM ends it at once."""
    config = settings.load(None, [*settings.to_words(config), "checkpoint.every=0", "train.steps=100000"])
    pid = forked(config, tmp_path)
    until(lambda: trains(config))
    step = attempts.progress_of(attempts.folder_of(config)).step
    for target in (pid, int((tmp_path / "rank1").read_text())):
        os.kill(target, signal.SIGUSR1)
    until(lambda: attempts.progress_of(attempts.folder_of(config)).step > step)
    os.kill(pid, signal.SIGTERM)
    assert ended(pid) == 143


def test_a_notice_that_ranks_do_not_agree_on_is_caught(config: RunConfig, tmp_path: Path, monkeypatch) -> None:
    """Planted: each rank looks at its own notice. The one that got it ends, and the others wait for it until the
    watchdog speaks."""
    own: list[Callable[[], bool]] = []
    read = Trainer.read

    def alone(trainer: Trainer, *args: object) -> object:
        found = read(trainer, *args)  # type: ignore[arg-type]
        own[:] = own or [trainer.asked]  # type: ignore[list-item]
        trainer.stopping = own[0]()
        return found

    monkeypatch.setattr(Trainer, "read", alone)
    config = settings.load(None, [*settings.to_words(config), "launch.timeout_s=3", "train.steps=100000"])
    pid = forked(config, tmp_path)
    until(lambda: trains(config))
    os.kill(int((tmp_path / "rank2").read_text()), signal.SIGUSR1)
    assert ended(pid) != 3 and complete(folder_of(config)) == []


def test_a_second_sigterm_is_meant() -> None:
    pid = os.fork()
    if pid == 0:
        with asked_to_end(heeds=True) as asked:
            signal.raise_signal(signal.SIGTERM)
            heard = asked()
            signal.raise_signal(signal.SIGTERM)
        os._exit(heard)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM


def test_handlers_come_back() -> None:
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1)]
    with asked_to_end(heeds=True) as asked:
        assert not asked()
        signal.raise_signal(signal.SIGUSR1)
        assert asked()
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1)] == before
