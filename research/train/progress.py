"""What a person sees of a run: a bar at a terminal, elsewhere a line now and then."""

import time
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from research.config import RunConfig
from research.train.loop import Step

EVERY_S = 10.0  # between two lines where there is no terminal


def shown(steps: Iterable[Step], config: RunConfig, quiet: bool = False) -> Iterator[Step]:
    """Pass the steps on, showing loss, tokens/s and the time left on standard error."""
    console = Console(stderr=True, quiet=quiet)
    title = config.record.arm or config.record.ablation or "train"
    said = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(title, total=config.train.steps)
        evaluated: float | None = None
        for step in steps:
            evaluated = step.eval_loss if step.eval_loss is not None else evaluated
            held_out = "" if evaluated is None else f"  held out {evaluated:.3f}"
            text = f"{title}  loss {step.loss:.3f}{held_out}  {step.tokens / step.ms * 1e3:,.0f} tokens/s"
            bar.update(task, advance=1, description=text)
            if not console.is_terminal and time.monotonic() - said > EVERY_S:
                said = time.monotonic()
                console.print(f"{text}  step {step.index + 1}/{config.train.steps}")
            yield step
