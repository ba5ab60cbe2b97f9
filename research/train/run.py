"""One run on one rank, from text to row."""

from datetime import UTC, datetime

import torch

from research import record
from research.config import RunConfig
from research.data.batches import GlobalBatches, HeldOut
from research.data.packing import Packed, held_out
from research.data.tokens import Corpus, open_tokens
from research.launch.process import Place
from research.launch.watchdog import watched
from research.mesh import Mesh
from research.record import Row
from research.train.loop import Step, Trainer, train
from research.train.metrics import make_row
from research.train.watch import boarded, shown, traced


def run(config: RunConfig, place: Place, device: torch.device) -> Row:
    """Train, and write the row (rank 0 writes, every rank returns it)."""
    started = datetime.now(UTC)
    corpus = open_tokens(config.data)
    batches = global_batches(config, corpus)
    validation = validation_batches(config, corpus) if config.train.eval_every else None
    mesh = Mesh.from_config(config, place.world, place.rank)
    with watched(mesh.ledger, place, config.launch.timeout_s):
        trainer = Trainer(config, mesh, device)
        steps = train(trainer, batches.microbatches_of, validation)
        if place.rank == 0:
            steps = shown(boarded(traced(steps, config), config), config)
        done: list[Step] = list(steps)
        following = batches.microbatches_of(len(done))
        row = make_row(trainer, place, done, following, corpus.unigram_entropy, validation, started)
    if place.rank == 0:
        record.write(row, config.record.folder)
    return row


def global_batches(config: RunConfig, corpus: Corpus) -> GlobalBatches:
    """Of the documents that are not held out. Raises ValueError naming a file that is too short, or whose ids are past
    the vocabulary."""
    t = config.train
    kept = _packed(config, corpus, kept=True)
    return GlobalBatches(kept, config.data.sequence, t.global_batch, t.microbatches, t.seed, corpus.weights)


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
