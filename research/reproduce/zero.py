"""ZeRO (Rajbhandari et al., SC20, arXiv 1910.02054): memory of model states and volumes of communication.

Both are counted, not computed: from the storage that trains, made for one rank of a world that does not exist (fake
process group), of a dense model with as many parameters as the paper's. Its tensors have sizes but no memory.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from research.build import build
from research.config import ModelConfig, RunConfig, Value, replace
from research.launch.process import fake_process_group
from research.mesh import Mesh
from research.models.batch import Batch
from research.models.decoder import Decoder
from research.parallel.axis import storage
from research.reproduce.cells import Cell, table
from research.train.loop import Trainer
from research.train.optim import make_moments
from research.train.storage import Storage

PAPER = "zero"
STAGES = {"baseline": 0, "Pos": 1, "Pos+g": 2, "Pos+g+p": 3}
# Wide and shallow, so that few tensors hold as many parameters; each divides by 1,024 ranks along some dim.
SHAPES = {
    "7.5B": (7.5e9, ModelConfig(dim=8192, layers=9, heads=64, kv_heads=8, head_dim=128, ffn=26624, experts=0)),
    "128B": (128e9, ModelConfig(dim=32768, layers=9, heads=256, kv_heads=8, head_dim=128, ffn=114688, experts=0)),
    "1T": (1e12, ModelConfig(dim=65536, layers=14, heads=512, kv_heads=8, head_dim=128, ffn=307200, experts=0)),
}
TINY = ModelConfig(dim=32, layers=3, heads=4, kv_heads=4, head_dim=8, ffn=64, vocab=64, experts=0)
RANKS = 8


def cells(papers: Path) -> Iterator[Cell]:
    yield from states(papers)
    yield from figure(papers)
    yield from volumes(papers)


def states(papers: Path) -> Iterator[Cell]:
    """Table 1, GB of 1e9 bytes; the paper cuts digits off or rounds them."""
    for row in table(papers, PAPER, "Table 1"):
        for column, theirs in list(row.items())[1:]:
            size, _, stage = column.partition("_")
            ours = gigabytes(size, STAGES[stage], row["DP"])
            yield Cell("Table 1", f"{row['DP']} ranks", column, theirs, ours, within=last_digit(theirs))


def figure(papers: Path) -> Iterator[Cell]:
    (row,) = table(papers, PAPER, "Figure 1")
    for column, theirs in row.items():
        ours = gigabytes("7.5B", STAGES[column], 64)
        yield Cell("Figure 1", "7.5B on 64 ranks", column, theirs, ours, within=last_digit(theirs))


def volumes(papers: Path) -> Iterator[Cell]:
    """Section 7: elements that a rank receives in a step of one microbatch, over the parameters. The paper leaves the
    factor (n-1)/n out, which is divided away here."""
    schemes = {"baseline DP (reduce-scatter + all-gather)": 0, "Pos": 1, "Pos+g": 2, "Pos+g+p": 3}
    for row in table(papers, PAPER, "Section 7"):
        if row["scheme"] in schemes:
            theirs = float(row["volume"].removesuffix(" Psi"))
            yield Cell("Section 7", row["scheme"], "volume over parameters", theirs, volume(schemes[row["scheme"]]))


def last_digit(printed: float) -> float:
    """One unit of it."""
    return 10.0 ** -len(str(printed).partition(".")[2])


def config_of(model: ModelConfig, zero: int, ranks: int) -> RunConfig:
    changes: dict[str, Value] = {
        "dp.degree": ranks,
        "dp.zero": zero,
        "dp.grad_dtype": "bfloat16",
        "train.dtype": "bfloat16",
    }
    return replace(RunConfig(model=model), changes)


def sized(parameters: float, c: ModelConfig) -> ModelConfig:
    """With the vocabulary that makes it so large, to half a row of embedding and head."""
    with torch.device("meta"):
        rest = sum(p.numel() for p in Decoder(replace(RunConfig(model=c), {"model.vocab": 1}).model).parameters())
    vocab = 1 + round((parameters - rest) / (2 * c.dim))
    return replace(RunConfig(model=c), {"model.vocab": vocab}).model


def gigabytes(size: str, zero: int, ranks: int) -> float:
    """Model states of one rank."""
    meta = torch.device("meta")
    config = config_of(sized(*SHAPES[size]), zero, ranks)
    with fake_process_group(ranks, 0):
        mesh = Mesh.from_config(config, ranks, 0, fake=True)
        built = build(config, mesh, meta, lambda name, spec, layout: torch.empty(layout.local_shape(), device=meta))
        return nbytes(storage(config, built, meta)) / 1e9


def nbytes(kept: Storage) -> int:
    """Of its tensors, each memory once; without the optimizer's step counts, a number for each tensor."""
    make_moments(kept.optimizer)
    alive: dict[int, int] = {}
    for tensor in (t for of_category in kept.tensors().values() for t in of_category if t.dim()):
        memory = tensor.untyped_storage()
        alive[memory._cdata] = memory.nbytes()
    return sum(alive.values())


def volume(zero: int) -> float:
    """Of a small model's training step, by the ledger."""
    config = config_of(TINY, zero, RANKS)
    ids = torch.zeros(RANKS, 4, dtype=torch.int64)
    with fake_process_group(RANKS, 0):
        trainer = Trainer(config, Mesh.from_config(config, RANKS, 0, fake=True), torch.device("cpu"))
        sums = trainer.backward([Batch(ids, ids, torch.arange(4).expand(RANKS, 4), ids)])
        trainer.queue(0, sums)
    sent = sum(n for label, n in trainer.mesh.ledger.bytes.items() if label.purpose in ("gradients", "parameters"))
    elements = sum(p.numel() for p in trainer.built.model.parameters())
    return float(sent / 2 / elements * RANKS / (RANKS - 1))
