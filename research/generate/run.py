"""Generation on one rank, from weights at rest to texts."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from research.config import RunConfig
from research.generate.decode import Ends, Generation, Text
from research.generate.source import Source, load
from research.launch.process import Place
from research.launch.watchdog import watched
from research.mesh import Mesh
from research.problems import ConfigError, Problem
from research.train.checkpoint.index import DamagedError


@dataclass(frozen=True)
class Generated:
    """What came of it, the same on every rank but for the bytes."""

    texts: Sequence[Text]
    seconds: float  # without the start of ranks and the reading of weights
    cache_token_bytes: int  # that this rank keeps of one token


def generate(
    source: Source,
    config: RunConfig,
    prompts: Sequence[Sequence[int]],
    ends: Ends,
    vocab: int,
    place: Place,
    device: torch.device,
) -> Generated:
    """Go on from prompts of ids. Raises ConfigError where files of a checkpoint are damaged."""
    mesh = Mesh.from_config(config, place.world, place.rank)
    with watched(mesh.ledger, place, config.launch.timeout_s):
        try:
            source.verify(place.rank, place.world)
        except DamagedError as error:
            raise ConfigError([Problem("checkpoint", None, str(error))]) from error
        built = load(source, config, mesh, device)
        generation = Generation(built, config, prompts, ends, vocab)
        begin = time.perf_counter()
        steps: Iterable[int] = generation.run()
        for _ in shown(steps, len(prompts) * config.generate.tokens) if place.rank == 0 else steps:
            pass
        return Generated(generation.texts, time.perf_counter() - begin, generation.cache.token_bytes)


def shown(steps: Iterable[int], most: int) -> Iterator[int]:
    """A bar on standard error, at a terminal."""
    console, begin, done = Console(stderr=True), time.perf_counter(), 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("generate", total=most)
        for tokens in steps:
            done += tokens
            speed = done / (time.perf_counter() - begin)
            bar.update(task, completed=done, description=f"generate  {speed:,.1f} tokens/s")
            yield tokens


def ending(ids: Sequence[int], stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> Ends:
    """A text ends with one of these ids ("end") or once it holds one of the stop texts ("stop")."""

    def ends(made: Sequence[int]) -> str:
        if made[-1] in ids:
            return "end"
        if stops:
            text = decode(made)
            return "stop" if any(s in text for s in stops) else ""
        return ""

    return ends
