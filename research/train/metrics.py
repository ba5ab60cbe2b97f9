"""From the steps of a run to its row."""

import math
import platform
import statistics
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypedDict

import torch

from research import comm
from research.data.batches import HeldOut
from research.data.tokens import Corpus
from research.launch.process import Place, threads
from research.ledger import EVAL, largest
from research.models.batch import Batch
from research.models.decoder import active_parameters
from research.models.flops import flops_per_token
from research.record import Hardware, Row, run_id
from research.settings import to_mapping
from research.train.checkpoint.saving import Checkpoints
from research.train.checkpoint.state import History
from research.train.loop import Load, Step, Trainer
from research.train.memory import peak_bytes
from research.train.optim import max_violation


class Version(NamedTuple):
    """Which code runs: the commit, "" outside a git checkout, and whether files differ from it."""

    commit: str
    dirty: bool


@cache
def code_version() -> Version:
    """Asked once, and kept by the ranks that are forked later: the checkout may move on meanwhile. A new file of the
    package counts as a difference."""
    root = Path(__file__).parents[2]
    commands = (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--", "research", "experiments"))
    try:
        commit, status = (
            subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True, timeout=10).stdout
            for words in commands
        )
    except (OSError, subprocess.SubprocessError):
        return Version("", False)
    return Version(commit.strip(), bool(status.strip()))


def make_row(
    trainer: Trainer,
    place: Place,
    steps: Sequence[Step],
    next_batch: Sequence[Batch],
    corpus: Corpus,
    held_out: HeldOut | None,
    started: datetime,
    version: Version,
    checkpoints: Checkpoints,
) -> Row:
    """The row of a finished run, as this rank saw it. Every rank must call it; memory is measured in one more step,
    on `next_batch`, which is not timed and changes no weight. Losses, norms, evaluations, tokens and choices of
    experts are those of all steps, also of those before the run was resumed."""
    config, built, history = trainer.config, trainer.built, checkpoints.history
    timed = timed_steps(steps, config.record.warmup_steps, config.record.profile)
    comm_bytes, exposed_ms, loads, peaks = _over_ranks(trainer, steps, timed, history, next_batch)
    causal = config.record.causal_flops
    flops = flops_per_token(config.model, built.specs, config.data.sequence, causal)
    speed = speed_of(timed)
    tflops = flops * speed.tokens_per_s / place.world / 1e12
    return Row(
        run_id=run_id(config),
        kind="measured",
        ablation=config.record.ablation,
        arm=config.record.arm,
        seed=config.train.seed,
        started=started.isoformat(timespec="seconds"),
        commit=version.commit,
        dirty=version.dirty,
        config=to_mapping(config),
        hardware=hardware(trainer.device, place, threads(place, config.launch)),
        parameters=sum(s.numel for s in built.specs.values()),
        active_parameters=active_parameters(config.model, built.specs),
        unigram_entropy=corpus.unigram_entropy,
        corpus=corpus.digest,
        loss=steps[-1].loss,
        losses=history.losses,
        grad_norms=history.norms,
        skipped_steps=history.skipped,
        tokens=history.tokens,
        resumed_step=checkpoints.first,
        resumed_from=str(checkpoints.source or ""),
        timed_steps=len(timed),
        tokens_per_s=speed.tokens_per_s,
        step_ms=speed.step_ms,
        step_ms_iqr=speed.step_ms_iqr,
        wall_s=(datetime.now(UTC) - started).total_seconds(),
        flops_per_token=flops,
        flops_convention=f"6 per active matrix element, attention {'causal' if causal else 'full'}",
        tflops_per_rank=tflops,
        mfu=tflops / config.record.peak_tflops if config.record.peak_tflops else None,
        peak_bytes=max(peaks, key=lambda p: sum(p.values())),
        rank_peak_bytes=peaks,
        comm_bytes=comm_bytes,
        exposed_comm_ms=exposed_ms,
        expert_choices={name: list(each.choices) for name, each in loads.items()},
        dropped_choices={name: list(each.dropped) for name, each in loads.items()} if config.model.capacity else {},
        max_violation={name: max_violation(each.choices) for name, each in loads.items()},
        overlapped_pairs="one after the other" if trainer.program.has_pairs else "",
        mtp_losses=[list(of_depth) for of_depth in zip(*history.ahead, strict=True)],
        **_evaluations(history.evals, held_out),
    )


class OverRanks(NamedTuple):
    """What is known only once all ranks have told theirs."""

    comm_bytes: dict[str, dict[str, float]]  # that a rank received in a step, by axis and label: the most of each
    exposed_ms: dict[str, float]  # that a rank waited in a timed step, by axis: the most of each
    loads: dict[str, Load]  # by MoE layer, of all stages
    peaks: list[dict[str, int]]  # bytes of each rank, by category


def _over_ranks(
    trainer: Trainer, steps: Sequence[Step], timed: Sequence[Step], history: History, next_batch: Sequence[Batch]
) -> OverRanks:
    """Bytes and waits are those of steps, without evaluations."""
    of_steps = {k: v for k, v in trainer.mesh.ledger.bytes.items() if k.phase != EVAL}
    mine = (
        {(k.axis, f"{k.purpose}/{k.op}/{k.phase}"): float(v / len(steps)) for k, v in of_steps.items()},
        _exposed(timed),
        {name: Load(*load.tolist()) for name, load in history.loads.items()},
        peak_bytes(trainer, next_batch),  # last, as its step is counted too
    )
    received, waits, loads, peaks = zip(*comm.gather_objects(mine, trainer.world, "row"), strict=True)
    comm_bytes: dict[str, dict[str, float]] = {}
    for (axis, label), value in sorted(largest(received).items()):
        comm_bytes.setdefault(axis, {})[label] = value
    load = {name: of_layer for of_rank in loads for name, of_layer in of_rank.items()}  # alike where ranks share layers
    return OverRanks(comm_bytes, dict(sorted(largest(waits).items())), load, list(peaks))


class Evaluations(TypedDict, total=False):
    """The fields of a row that say what the evaluations found."""

    evals: list[list[float]]
    eval_loss: float
    perplexity: float
    bits_per_byte: float | None


def _evaluations(evals: list[list[float]], held_out: HeldOut | None) -> Evaluations:
    """Perplexity is exp of the last loss; bits per byte are the nats of all counted tokens over ln 2 and over the UTF-8
    bytes of the held-out documents. The first token of a document is not counted, its `end` is."""
    if held_out is None or not evals:
        return {}
    loss, size = evals[-1][1], held_out.text_bytes
    return {
        "evals": evals,
        "eval_loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "bits_per_byte": loss * held_out.counted / math.log(2) / size if size else None,
    }


class Speed(NamedTuple):
    """Of the steps that are timed."""

    tokens_per_s: float
    step_ms: float  # median
    step_ms_iqr: float  # interquartile range


def timed_steps(steps: Sequence[Step], warmup: int, profiled: bool = False) -> Sequence[Step]:
    """Those after the warm-up, without the last one where that was traced."""
    return steps[warmup : len(steps) - profiled]


def speed_of(steps: Sequence[Step]) -> Speed:
    """NaN where there is nothing to tell it from. Tokens of skipped steps do not count."""
    if not steps:
        return Speed(math.nan, math.nan, math.nan)
    ms = [s.ms for s in steps]
    low, _, high = statistics.quantiles(ms, n=4, method="inclusive") if len(ms) > 1 else (0.0, 0.0, math.nan)
    return Speed(_trained(steps) / sum(ms) * 1e3, statistics.median(ms), high - low)


def _trained(steps: Sequence[Step]) -> int:
    """Tokens of the steps that were made."""
    return sum(s.tokens for s in steps if not s.skipped)


def _exposed(steps: Sequence[Step]) -> dict[str, float]:
    """Mean over steps by axis, milliseconds."""
    axes = {axis for s in steps for axis in s.exposed_ms}
    return {axis: sum(s.exposed_ms.get(axis, 0.0) for s in steps) / len(steps) for axis in sorted(axes)}


def hardware(device: torch.device, place: Place, threads: int) -> Hardware:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return Hardware(name, place.world, place.nodes, threads, torch.__version__, platform.python_version())


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
