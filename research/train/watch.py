"""Ways to watch a run, each a generator that passes the steps on: a progress bar, the table of a sweep, TensorBoard, a
trace."""

import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from research import attempts
from research.config import RunConfig
from research.record import run_id, tensorboard_folder
from research.settings import flat, to_mapping
from research.train.loop import Step
from research.train.optim import learning_rate, max_violation

EVERY_S = 10.0  # between two lines where there is no terminal
TELL_S = 1.0  # between two words to a sweep that watches


def shown(steps: Iterable[Step], config: RunConfig, first: int = 0) -> Iterator[Step]:
    """Loss, tokens/s and the time left, on standard error: a bar at a terminal, elsewhere a line now and then."""
    console = Console(stderr=True)
    title = config.record.arm or config.record.ablation or "train"
    said = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=config.train.steps, completed=first)
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


def told(steps: Iterable[Step], config: RunConfig) -> Iterator[Step]:
    """Step, loss and tokens/s, now and then, to a sweep that watches."""
    said = -TELL_S
    for step in steps:
        if time.monotonic() - said > TELL_S:
            said = time.monotonic()
            how = attempts.Progress(step.index + 1, config.train.steps, step.loss, step.tokens / step.ms * 1e3)
            attempts.tell(how, config)
        yield step


def boarded(steps: Iterable[Step], config: RunConfig, first: int = 0) -> Iterator[Step]:
    """TensorBoard, where `record.tensorboard`: scalars of each step, of routing those of the MoE layers on the stage of
    this rank (the row has all); at the end all keys with the last loss as hyper-parameters, so that runs can be sorted
    and compared by them."""
    if not config.record.tensorboard:
        yield from steps
        return
    from torch.utils.tensorboard import SummaryWriter  # a second of imports that other runs need not pay

    folder, last = tensorboard_folder(config), None
    if not first:
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier run, whose row is replaced as well
    with SummaryWriter(folder, purge_step=first or None) as writer:
        for step in steps:
            last = step
            scalars = {
                "loss/cross_entropy": step.loss,
                "loss/auxiliary": step.aux,
                "optimizer/gradient_norm": step.norm,
                "optimizer/learning_rate": learning_rate(config.train, step.index),
                "speed/tokens_per_s": step.tokens / step.ms * 1e3,
                "speed/step_ms": step.ms,
            }
            scalars |= {f"loss/depth_{k}": loss for k, loss in enumerate(step.ahead, 1)}
            for name, load in step.loads.items():
                scalars[f"routing/{name}/max_violation"] = max_violation(load.choices)
                scalars[f"routing/{name}/idle_experts"] = load.choices.count(0)
                if config.model.capacity:
                    scalars[f"routing/{name}/dropped_choices"] = sum(load.dropped)
            if step.eval_loss is not None:
                scalars["loss/held_out"] = step.eval_loss
            for name, value in scalars.items():
                writer.add_scalar(name, value, step.index)
            yield step
        if last is not None:
            keys = {k: v if isinstance(v, (int, float, bool, str)) else str(v) for k, v in flat(to_mapping(config))}
            writer.add_hparams(keys, {"final/loss": last.loss}, run_name=".")


def traced(steps: Iterable[Step], config: RunConfig, first: int = 0) -> Iterator[Step]:
    """A trace of the last step, where `record.profile`: actions by name, communication by axis and purpose."""
    if not config.record.profile:
        yield from steps
        return
    profiler, last = torch.profiler.profile(), config.train.steps - 1  # CPU, and CUDA where there is one
    if first == last:
        profiler.start()
    for step in steps:
        if step.index == last:
            profiler.stop()
            path = Path(config.record.folder) / "traces" / f"{run_id(config)}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f".{path.name}")
            profiler.export_chrome_trace(str(unfinished))
            unfinished.replace(path)
        yield step
        if step.index == last - 1:
            profiler.start()
