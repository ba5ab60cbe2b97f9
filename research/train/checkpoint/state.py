"""What a training is made of: weights, moments, step; and what else a run that goes on must know.

There is no random state beside the seed: initial values, the order of samples and whatever else is drawn are functions
of the seed and of global positions (step, name, sample), never of a generator that has been moved.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from research.built import Built
from research.config import RunConfig
from research.mesh import Group
from research.settings import flat, to_mapping
from research.train.checkpoint.index import CheckpointError, read_index, told
from research.train.checkpoint.pieces import Piece
from research.train.checkpoint.storage import WEIGHT
from research.train.checkpoint.transfer import Ranks, matching
from research.train.checkpoint.whole import read_tensor
from research.train.loop import Step, Trainer
from research.train.storage import Storage

HISTORY = "history/"
LOADS = f"{HISTORY}loads/"  # and the name of a MoE layer
RECORDED = ("losses", "norms", "evals", "ahead")  # fields of `History` that are lists
# The step tells the place in the data only where these agree, and the text itself.
MUST_AGREE = ("data.weights", "data.heldout", "data.sequence", "train.global_batch", "train.seed")


@dataclass
class History:
    """What the steps of a run have given so far, whatever was resumed in between."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evals: list[list[float]] = field(default_factory=list)  # [steps made, loss]
    ahead: list[list[float]] = field(default_factory=list)  # of each step, by depth of multi-token prediction
    skipped: int = 0
    tokens: int = 0  # of the steps that were made
    loads: dict[str, Tensor] = field(default_factory=dict)  # by MoE layer of this rank's stages (2, E), as `Load`

    @property
    def steps(self) -> int:
        return len(self.losses)

    def add(self, step: Step) -> None:
        self.losses.append(step.loss)
        self.norms.append(step.norm)
        self.ahead.append(list(step.ahead))
        self.skipped += step.skipped
        self.tokens += 0 if step.skipped else step.tokens
        for name, load in step.loads.items():
            self.loads[name] = torch.tensor(load) + self.loads.get(name, 0)
        if step.eval_loss is not None:
            self.evals.append([step.index + 1, step.eval_loss])


def pieces_of(storage: Storage) -> Iterator[Piece]:
    """Weights as the optimizer steps them (float32 masters of a bfloat16 run), those without a gradient too, and all
    that the optimizer knows of them."""
    first = True
    for name, box, local in storage.weights():
        shape = storage.built.specs[name].shape
        writes = storage.built.first_holds(name) and writes_copy(name, storage.copies(name))
        inside = tuple(slice(size) for _, size in box)
        yield Piece(WEIGHT + name, shape, box, local[inside], writes)
        for key, value in storage.moments(name).items():
            if value.shape == local.shape:
                yield Piece(f"{key}/{name}", shape, box, value[inside], writes)
            else:  # the number of steps, the same for all
                yield Piece(f"optimizer/{key}", (), (), value, first and storage.built.mesh.rank == 0)
        first = False


def writes_copy(name: str, copies: Group) -> bool:
    """Whether this rank writes the box that all of `copies` hold: by name, so that they share the work."""
    return zlib.crc32(name.encode()) % copies.size == copies.rank


def history_pieces(history: History, built: Built) -> Iterator[Piece]:
    """Those that this rank writes: what all know is the first one's, loads are the first one's that has them."""
    if built.mesh.rank == 0:
        for name in RECORDED:
            yield _whole(HISTORY + name, torch.tensor(getattr(history, name), dtype=torch.float64))
    if built.mesh.group("stage").rank == 0:
        for name, load in history.loads.items():
            if built.first_holds(f"{name}.ffn.router"):
                yield _whole(LOADS + name, load)


def _whole(name: str, tensor: Tensor) -> Piece:
    return Piece(name, tuple(tensor.shape), tuple((0, n) for n in tensor.shape), tensor)


def state_of(trainer: Trainer, history: History, corpus: str) -> dict[str, Any]:
    """What is no tensor. The schedule is a function of the step."""
    return {
        "step": history.steps,
        "skipped_in_a_row": trainer.skipped_in_a_row,
        "skipped": history.skipped,
        "tokens": history.tokens,
        "corpus": corpus,
        "config": to_mapping(trainer.config),
        "torch": torch.__version__,
    }


def save_everything(trainer: Trainer, history: History, corpus: str) -> tuple[list[Piece], dict[str, Any]]:
    """Pieces and state of a training as it stands between two steps."""
    pieces = [*pieces_of(trainer.storage), *history_pieces(history, trainer.built)]
    return pieces, state_of(trainer, history, corpus)


def restore(trainer: Trainer, checkpoint: Path, ranks: Ranks, corpus: str) -> History:
    """Make a fresh trainer what the saved one was, whatever its layout. Raises CheckpointError, before anything has
    changed, where something does not fit or is damaged (`Ranks.load`), or where the data would go on elsewhere."""
    index = read_index(checkpoint)
    if problems := list(disagreements(trainer.config, corpus, index.state)):
        raise CheckpointError(f"checkpoint {checkpoint} cannot be continued:{told(problems)}")
    ranks.load(checkpoint, list(pieces_of(trainer.storage)), lambda name: not name.startswith(HISTORY))
    trainer.storage.publish()
    state = index.state
    trainer.skipped_in_a_row = state["skipped_in_a_row"]
    history = History(skipped=state["skipped"], tokens=state["tokens"])
    for name in RECORDED:
        if HISTORY + name in index.tensors:  # no empty one is stored
            setattr(history, name, read_tensor(checkpoint, index, HISTORY + name).tolist())
    for name, _ in trainer.built.model.named_modules():
        if LOADS + name in index.tensors:
            history.loads[name] = read_tensor(checkpoint, index, LOADS + name)
    return history


def disagreements(config: RunConfig, corpus: str, state: Mapping[str, Any]) -> Iterator[str]:
    """Why a run of this config cannot go on from this state."""
    if "step" not in state:
        yield "it holds weights only; checkpoint.weights starts a run from it"
        return
    now, before = (dict(flat(c)) for c in (to_mapping(config), state["config"]))
    for key in MUST_AGREE:
        if now[key] != before.get(key, now[key]):
            yield f"{key}={now[key]} was {before[key]}: the step would tell another place in the data"
    if corpus != state["corpus"]:
        yield f"the text of data.path={now['data.path']} is another one: its digest {corpus} was {state['corpus']}"


def take_weights(trainer: Trainer, checkpoint: Path, ranks: Ranks, patterns: Sequence[str]) -> None:
    """Replace the weights whose names fit a pattern by those of a checkpoint, which may hold them in a narrower dtype.
    Raises CheckpointError as `Ranks.load`."""
    fits = matching([WEIGHT + p for p in patterns])
    pieces = [p for p in pieces_of(trainer.storage) if fits(p.name)]
    if not any(fits(name) for name in read_index(checkpoint).tensors):
        raise CheckpointError(f"checkpoint {checkpoint}: no weight fits checkpoint.weights_names={list(patterns)}")
    ranks.load(checkpoint, pieces, fits, widen=True)
    trainer.storage.publish()
