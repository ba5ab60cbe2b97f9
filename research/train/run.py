"""One run on one rank, from text to row."""

from collections.abc import Callable
from datetime import UTC, datetime

import torch

from research import comm, record
from research.attempts import Progress, tell
from research.config import RunConfig
from research.data.batches import GlobalBatches, HeldOut
from research.data.packing import Packed, held_out
from research.data.tokens import Corpus, open_tokens
from research.launch.preemption import asked_to_end
from research.launch.process import Place
from research.launch.watchdog import watched
from research.mesh import Mesh
from research.problems import ConfigError, Problem
from research.record import NOT_IDENTITY, Row, meaning
from research.settings import flat, to_mapping
from research.train.checkpoint.saving import Checkpoints
from research.train.loop import Step, Trainer, train
from research.train.metrics import Version, code_version, make_row
from research.train.watch import boarded, shown, told, traced


def run(config: RunConfig, place: Place, device: torch.device) -> Row | None:
    """Train, and write the row (rank 0 writes, every rank returns it). None: a notice came to one of the ranks, so that
    all of them saved and ended after the same step."""
    with asked_to_end(heeds=config.checkpoint.every > 0) as asked:
        return _run(config, place, device, asked)


def _run(config: RunConfig, place: Place, device: torch.device, asked: Callable[[], bool]) -> Row | None:
    started, version = datetime.now(UTC), code_version() if place.rank == 0 else Version("", False)
    corpus = open_tokens(config.data)
    batches = global_batches(config, corpus)
    validation = validation_batches(config, corpus) if config.train.eval_every else None
    mesh = Mesh.from_config(config, place.world, place.rank)
    with watched(mesh.ledger, place, config.launch.timeout_s):
        require_alike(config, corpus, mesh)
        trainer = Trainer(config, mesh, device)
        checkpoints = Checkpoints(trainer, corpus.digest)
        first = checkpoints.first
        trainer.asked = asked if config.checkpoint.every else None
        steps = checkpoints.saving(train(trainer, batches.microbatches_of, validation, first), lambda: trainer.stopping)
        if place.rank == 0:
            steps = shown(boarded(traced(told(steps, config), config, first), config, first), config, first)
        done: list[Step] = list(steps)
        checkpoints.wait()
        if (made := first + len(done)) < config.train.steps:
            if place.rank == 0:
                tell(Progress(made, config.train.steps, done[-1].loss, saved=True), config)
            return None
        following = batches.microbatches_of(made)
        row = make_row(trainer, place, done, following, corpus, validation, started, version, checkpoints)
    if place.rank == 0:
        record.write(row, config.record.folder)
    return row


def require_alike(config: RunConfig, corpus: Corpus, mesh: Mesh) -> None:
    """Ranks that a launcher started may stand on different nodes. Raises ConfigError on every rank where their configs
    or their texts differ: nothing else would show it."""
    mine: dict[str, object] = {
        k: meaning(v) for k, v in flat(to_mapping(config)) if k not in NOT_IDENTITY or k.startswith("checkpoint.")
    }
    everyone = comm.gather_objects(mine | {"text of data.path": corpus.digest}, mesh.group("world"), "start")
    problems = []
    for what, value in everyone[0].items():
        if odd := [rank for rank, theirs in enumerate(everyone) if theirs[what] != value]:
            theirs = everyone[odd[0]][what]
            problems.append(Problem(f"{what} of ranks {odd}", theirs, f"differs from rank 0's {value}", "one for all"))
    if problems:
        raise ConfigError(problems)


def global_batches(config: RunConfig, corpus: Corpus) -> GlobalBatches:
    """Of the documents that are not held out. Raises ValueError naming a file that is too short, or whose ids are past
    the vocabulary."""
    t = config.train
    kept = _packed(config, corpus, kept=True)
    sizes = config.data.sequence, t.global_batch, t.microbatches
    return GlobalBatches(kept, *sizes, t.seed, corpus.weights, config.model.mtp_depth)


def validation_batches(config: RunConfig, corpus: Corpus) -> HeldOut:
    """Of the documents that are held out, in batches as large as the smallest microbatch: every rank has a row."""
    rows = config.train.global_batch // config.train.microbatches
    return HeldOut(_packed(config, corpus, kept=False), config.data.sequence, rows)


def _packed(config: RunConfig, corpus: Corpus, kept: bool) -> list[Packed]:
    """The documents of each source that are kept for training, or those that are held out."""
    packed = []
    for k, tokens in enumerate(corpus.sources):
        tokens.require(config.model.vocab)
        count = len(tokens.offsets) - 1
        chosen = held_out(count, config.data.heldout, config.train.seed, k) if config.data.heldout else None
        packed.append(Packed(tokens, ~chosen if kept and chosen is not None else chosen))
    return packed
