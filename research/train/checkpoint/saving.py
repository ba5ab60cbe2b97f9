"""The checkpoints of a run: what it starts from, and when it saves."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from research import comm
from research.config import RunConfig
from research.problems import ConfigError, Problem
from research.train.checkpoint.choice import folder_of, resumed_from, weights_from
from research.train.checkpoint.index import CheckpointError
from research.train.checkpoint.state import History, restore, save_everything, take_weights
from research.train.checkpoint.transfer import Ranks, Saver
from research.train.loop import Step, Trainer


def never() -> bool:
    return False


class Checkpoints:
    """Made by every rank, as it is collective: it loads what the config says that the run starts from."""

    def __init__(self, trainer: Trainer, corpus: str) -> None:
        """`corpus` is the digest of the run's text. Raises ConfigError on every rank, before anything has changed,
        where the source is damaged or does not fit."""
        config, mesh, c = trainer.config, trainer.mesh, trainer.config.checkpoint
        self._trainer, self._corpus, self._every = trainer, corpus, c.every
        self.source, self.history = resumed_from(config), History()
        self._saver: Saver | None = None
        weights = weights_from(config)
        if c.resume or c.weights or c.every:
            ranks = Ranks(mesh.world, mesh.rank)
            try:
                self._start(weights, ranks)
            except CheckpointError as error:
                key, value = ("resume", c.resume) if self.source else ("weights", c.weights)
                raise ConfigError([Problem(f"checkpoint.{key}", value, f"cannot be followed: {error}")]) from error
            if self._every:
                self._saver = saver_of(config, ranks)
                trainer.storage.optimizer.register_step_pre_hook(self._saver.before_update)
        self.first = self._saved = self.history.steps  # the step to go on with; the one that was saved last

    def _start(self, weights: Path | None, ranks: Ranks) -> None:
        sources = comm.gather_objects(str(self.source), self._trainer.world, "checkpoint")
        if len(set(sources)) > 1:  # a file system that does not show all nodes the same
            raise CheckpointError(f"ranks see different checkpoints: {sorted(set(sources))}")
        if self.source:
            self.history = restore(self._trainer, self.source, ranks, self._corpus)
        elif weights:
            take_weights(self._trainer, weights, ranks, self._trainer.config.checkpoint.weights_names)

    def saving(self, steps: Iterable[Step], stop: Callable[[], bool] = never) -> Iterator[Step]:
        """Pass the steps on and save when it is time; the last save may still be under way at the end (`wait`).
        `stop` is asked after each step, and must answer alike on all ranks: if true, that step is saved, and is the
        last one."""
        for step in steps:
            self.history.add(step)
            if self._saver is not None:
                self._saver.check()
            made, stopped = step.index + 1, stop()
            if (self._every and made % self._every == 0) or made == self._trainer.config.train.steps or stopped:
                self.save()
            yield step
            if stopped:
                return

    def save(self) -> None:
        """Start to save the training as it stands between two steps; collective."""
        if self._saver is not None and self._saved < self.history.steps:
            self._saver.save(self.history.steps, *save_everything(self._trainer, self.history, self._corpus))
            self._saved = self.history.steps

    def wait(self) -> None:
        """Until all saves are complete. Raises CheckpointError where one failed."""
        if self._saver is not None:
            self._saver.wait()


def saver_of(config: RunConfig, ranks: Ranks) -> Saver:
    c = config.checkpoint
    return Saver(folder_of(config), ranks, c.keep, c.keep_every)
