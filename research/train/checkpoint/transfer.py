"""Saving beside the training, and loading, by torch's DCP: each a collective of all ranks."""

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from research.train.checkpoint.index import (
    CheckpointError,
    DamagedError,
    complete,
    damaged,
    number_of,
    open_index,
    prune,
    step_folder,
    told,
)
from research.train.checkpoint.pieces import Loads, Piece, Saves
from research.train.checkpoint.storage import Reader, Writer, new_number
from research.train.checkpoint.tensor_file import Pace

LONGEST_S = 7200.0  # a rank with little to write waits so long for the one with most
SHARE = 0.08  # of a core, for a save beside a training that needs the cores itself
FAST = Pace()
T = TypeVar("T")

# One process is no mistake here.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class Ranks:
    """All ranks, with a gloo group of their own: saves run beside the collectives of the training."""

    def __init__(self, world: int, rank: int) -> None:
        self.world, self.rank = world, rank
        timeout = timedelta(seconds=LONGEST_S)
        self.group = dist.new_group(backend="gloo", timeout=timeout) if world > 1 else None

    def save(
        self,
        folder: Path,
        number: Callable[[], int],
        state: Mapping[str, Any],
        pieces: Sequence[Piece],
        pace: Pace = FAST,
    ) -> None:
        """Write the checkpoint `folder`. Raises CheckpointError on every rank, with what each failing one said."""
        self._together(
            lambda: state_dict_saver.save(
                {},
                storage_writer=Writer(folder, number, state, pace),
                planner=Saves(pieces),
                process_group=self.group,
                no_dist=self.group is None,
            )
        )

    def load(
        self, folder: Path, pieces: Sequence[Piece], expected: Callable[[str], bool], widen: bool = False
    ) -> Mapping[str, Any]:
        """Fill the pieces from the checkpoint `folder`, and return its state.

        Raises CheckpointError on every rank, before any tensor is touched: with a list of the entries that are missing,
        misshapen, of another dtype, or stored though no rank wants them (of those that are `expected`); or with
        the damaged files by name, and the complete checkpoint before this one.
        """
        index = open_index(folder)
        reader = Reader(folder, index, [n for n in index.tensors if expected(n)], self.rank, self.world)
        try:
            self._together(
                lambda: state_dict_loader.load(
                    {},
                    storage_reader=reader,
                    planner=Loads(pieces, expected, widen),
                    process_group=self.group,
                    no_dist=self.group is None,
                )
            )
        except DamagedError as error:
            raise damaged(folder, str(error).splitlines()) from None
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint {folder}: {error}") from None
        return index.state

    def _together(self, body: Callable[[], T]) -> T:
        """DCP tells every rank of the failures of all."""
        try:
            return body()
        except CheckpointException as error:
            causes = {rank: cause for rank, (cause, _) in error.failures.items()}
            if lines := [str(c) for c in causes.values() if isinstance(c, DamagedError)]:
                raise DamagedError("\n".join(lines)) from error
            if len(texts := {_text(c) for c in causes.values()}) == 1:
                raise CheckpointError(texts.pop()) from error
            raise CheckpointError(told(f"rank {rank}: {_text(c)}" for rank, c in causes.items())) from error


def _text(cause: BaseException) -> str:
    return str(cause) if isinstance(cause, CheckpointError) else f"{type(cause).__name__}: {cause}"


def matching(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Whether a name fits one of the patterns, as file names do."""
    return lambda name: any(fnmatchcase(name, p) for p in patterns)


class Saver:
    """Saves of one run into `folder`, beside its training, one at a time.

    A save copies what this rank writes into buffers on the host, and a thread writes them. A failure is raised by the
    next call of any method. Buffers are kept: they take as much host memory as this rank writes.
    """

    def __init__(self, folder: Path, ranks: Ranks, keep: int, keep_every: int) -> None:
        self.folder, self._ranks, self._keep, self._keep_every = folder, ranks, keep, keep_every
        self._buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._copied: torch.cuda.Event | None = None
        self._pending: Future[None] | None = None
        self._pending_step, self._pace = 0, FAST

    def save(self, step: int, pieces: Sequence[Piece], state: Mapping[str, Any]) -> None:
        """Start to save the pieces as they are now; waits for the save before, if that has not ended yet."""
        self.wait()
        staged = self._stage([p for p in pieces if p.writes and not p.empty])
        copied, self._pending_step = self._copied, step
        pace = Pace(SHARE) if copied is None else FAST

        def write() -> None:
            if copied is not None:
                with torch.cuda.device(copied.device):  # a new thread would wake the node's first one
                    copied.synchronize()
            target = step_folder(self.folder, step)
            self._ranks.save(target, lambda: new_number(map(number_of, complete(self.folder))), state, staged, pace)
            if self._ranks.rank == 0:
                prune(self.folder, self._keep, self._keep_every)

        self._pending, self._pace = beside(write), pace

    def check(self) -> None:
        """Raise what a save that has ended failed with."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Until the save under way, if any, is complete."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._pace.hurry()
            try:
                pending.result()
            except (CheckpointError, OSError) as error:
                raise CheckpointError(f"the checkpoint of step {self._pending_step} was not saved: {error}") from error

    def before_update(self, *_: object) -> None:
        """To be called before tensors change: on CUDA the stream then waits until they are copied, the host does
        not. It takes what a hook of an optimizer is given."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def _stage(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Copies on the host. On CUDA they are made by a stream of their own, beside the next forward and backward."""
        cuda = next((p.tensor.device for p in pieces if p.tensor.is_cuda), None)
        if cuda is None:
            return [self._copy(p) for p in pieces]
        stream, self._copied = torch.cuda.Stream(cuda), torch.cuda.Event()
        stream.wait_stream(torch.cuda.current_stream(cuda))
        with torch.cuda.stream(stream):
            staged = [self._copy(p) for p in pieces]
            self._copied.record(stream)
        return staged

    def _copy(self, piece: Piece) -> Piece:
        key, like = (piece.name, tuple(offset for offset, _ in piece.box)), piece.tensor
        if key not in self._buffers or self._buffers[key].shape != like.shape:
            self._buffers[key] = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
        return replace(piece, tensor=self._buffers[key].copy_(like.detach(), non_blocking=True))


def beside(body: Callable[[], None]) -> Future[None]:
    """Run in a thread that does not keep the process alive."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            body()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future
