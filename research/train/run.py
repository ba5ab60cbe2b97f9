"""One run on one rank, from text to row."""

from datetime import UTC, datetime

import torch

from research import record
from research.config import RunConfig
from research.data.batches import GlobalBatches
from research.data.tokens import Tokens, open_tokens
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
    tokens = open_tokens(config.data)
    batches = global_batches(config, tokens)
    mesh = Mesh.from_config(config, place.world, place.rank)
    with watched(mesh.ledger, place, config.launch.timeout_s):
        trainer = Trainer(config, mesh, device)
        steps = train(trainer, batches.microbatches_of)
        if place.rank == 0:
            steps = shown(boarded(traced(steps, config), config), config)
        done: list[Step] = list(steps)
        row = make_row(trainer, place, done, batches.microbatches_of(len(done)), tokens.unigram_entropy, started)
    if place.rank == 0:
        record.write(row, config.record.folder)
    return row


def global_batches(config: RunConfig, tokens: Tokens) -> GlobalBatches:
    t = config.train
    return GlobalBatches(tokens, config.data.sequence, t.global_batch, t.microbatches, t.seed)
