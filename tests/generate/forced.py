"""Logits of texts that are told which tokens to take, with the cache in any layout, and without it in one process."""

from collections.abc import Sequence

import torch
from torch import Tensor

from research.build import build
from research.config import RunConfig
from research.generate.decode import Generation
from research.launch.local import start
from research.mesh import Mesh, total_ranks
from research.models.batch import Batch
from research.parallel import axis
from research.settings import load
from research.train.proof import reference_of

LENGTHS, MADE, VOCAB = (5, 1, 23, 8), 12, 250
ALL = 10**6  # ids that may be chosen: whatever the ranks give logits of
LIMIT_S = 60.0
CPU = torch.device("cpu")


def config_of(*words: str) -> RunConfig:
    words = ("model.init_std=0.3", f"generate.tokens={MADE}", "generate.block=4", *words)
    return load("experiments/configs/tiny.yaml", words, [axis.problems])


def texts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """Prompts and what follows them."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB, (n + MADE,), generator=generator).tolist() for n in lengths]


class Forced(Generation):
    """It takes what it is told, and remembers logits by text."""

    def __init__(self, config: RunConfig, mesh: Mesh, tokens: Sequence[Sequence[int]]) -> None:
        prompts = [t[:-MADE] for t in tokens]
        super().__init__(build(config, mesh, CPU), config, prompts, lambda made: "", ALL)
        self.tokens, self.logits = tokens, dict[int, list[Tensor]]()

    def chosen(self, logits: Tensor) -> Tensor:
        told = torch.zeros_like(logits)
        for i, text in enumerate(self.going):
            self.logits.setdefault(text.number, []).append(logits[i].clone())
            told[i, self.tokens[text.number][text.length]] = 1
        return super().chosen(told)


def with_cache(config: RunConfig, lengths: Sequence[int] = LENGTHS) -> list[dict[int, Tensor]]:
    """Of each rank: logits (MADE, V) of its texts."""

    def run(place, device):
        made = Forced(config, Mesh.from_config(config, place.world, place.rank), texts(lengths))
        assert sum(made.run()) == len(lengths) * MADE
        return {n: torch.stack(rows) for n, rows in made.logits.items()}

    if total_ranks(config) == 1:
        made = Forced(config, Mesh({}), texts(lengths))
        assert sum(made.run()) == len(lengths) * MADE
        return [{n: torch.stack(rows) for n, rows in made.logits.items()}]
    return start(run, total_ranks(config), config.launch, LIMIT_S)


def without(config: RunConfig, lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
    """Of each text by itself, all tokens at once."""
    model, found = build(reference_of(config), Mesh({}), CPU).model, []
    for tokens in texts(lengths):
        ids = torch.tensor([tokens])
        places = torch.arange(len(tokens))[None]
        batch = Batch(ids, ids, places, torch.zeros_like(ids), whole_tokens=len(tokens))
        with torch.no_grad():
            found.append(model.logits(batch, torch.arange(len(tokens) - MADE - 1, len(tokens) - 1)))
    return found


def distance(config: RunConfig, lengths: Sequence[int] = LENGTHS) -> float:
    """The largest relative error of the logits of any text on any rank."""
    want, ranks = without(config, lengths), with_cache(config, lengths)
    assert set().union(*ranks) == set(range(len(lengths)))
    errors = [(rank[n] - want[n]).norm() / want[n].norm() for rank in ranks for n in rank]
    return float(torch.stack(errors).max())
