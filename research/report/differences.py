"""The core differences between kinds of parallelism: what each cuts, holds, sends, waits for and needs of a link.

Every cell is counted: cuts from layouts and from a cut batch, shares and bytes from the rows of an ablation, the bubble
by simulating the schedule, the link from the axes' closed formulas at the size of a large model.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import pandas as pd
import torch

from research.build import wired
from research.config import AXIS_SECTIONS, RunConfig
from research.launch.process import fake_process_group
from research.mesh import Mesh, total_ranks
from research.models.batch import Batch
from research.models.decoder import Decoder, specs
from research.models.flops import flops_per_token
from research.parallel.axis import cut_batch, layout_of, staged
from research.parallel.cp.cost import traffic as of_cp
from research.parallel.dp.cost import traffic as of_dp
from research.parallel.ep.cost import traffic as of_ep
from research.parallel.pp import schedule_of
from research.parallel.pp.cost import traffic as of_pp
from research.parallel.pp.simulate import even, simulate
from research.parallel.tp.cost import traffic as of_tp
from research.record import Row
from research.report.formulas import config_of
from research.report.tables import MIB, frame, number

STATE = ("parameters", "gradients", "optimizer")
SHARES = (*STATE, "activations")
TFLOPS = 400.0  # that an H100 SXM may reach in bfloat16, of 989 (NVIDIA H100 datasheet)
LINKS = {"network": 50.0, "NVLink": 450.0}  # GB/s into such a GPU: a 400 Gb/s card, NVLink 4 in one direction


@dataclass(frozen=True)
class Kind:
    """The arm that shows a kind of parallelism, the arm that lacks only that, and the axis along which it sends."""

    arm: str
    over: str
    axis: str


KINDS = {
    "DP": Kind("dp2", "one_process", "dp"),
    "ZeRO-3": Kind("dp2_zero3", "dp2", "dp"),
    "TP": Kind("tp2_repeated", "one_process", "tp"),
    "SP": Kind("tp2", "tp2_repeated", "tp"),
    "PP": Kind("pp2", "one_process", "pp"),
    "CP": Kind("cp2", "one_process", "cp"),
    "EP": Kind("ep2", "dp2", "ep"),
}


def differences(rows: Iterable[Row], large: RunConfig, degree: int) -> pd.DataFrame:
    """A line for each kind. Shares are those of what a rank of the arm `over` holds in its fullest moment; `received`
    are MiB of one rank in a step along the axis; `link` is for the `large` model at `degree` ranks of the axis alone.
    Raises ValueError where an arm has no row."""
    by_arm = {row.arm: row for row in rows}
    if missing := {arm for k in KINDS.values() for arm in (k.arm, k.over)} - {*by_arm}:
        raise ValueError(f"there is no row of {', '.join(sorted(missing))}")
    lines, flops = {}, work(large)
    for name, kind in KINDS.items():
        row, over = by_arm[kind.arm], by_arm[kind.over]
        config = config_of(row)
        share = {c: row.peak_bytes[c] / over.peak_bytes[c] for c in SHARES}
        own = cuts(config) - cuts(config_of(over)) or {c for c in STATE if share[c] < 1}
        wide = in_place_of(config, large, degree)
        seconds = flops / total_ranks(wide) / (TFLOPS * 1e12)
        need = float(along(wide, kind.axis)) / seconds / 1e9
        lines[name] = {
            "over": kind.over,
            "cuts": ", ".join(sorted(own)),
            **share,
            "peak (MiB)": sum(row.peak_bytes.values()) / MIB,
            "received (MiB)": sum(row.comm_bytes[kind.axis].values()) / MIB,
            "where": _where(row.comm_bytes[kind.axis]),
            "bubble": bubble(config),
            "needs (GB/s)": need,
            "link": next((link for link, speed in LINKS.items() if speed >= need), "none"),
        }
    return pd.DataFrame.from_dict(lines, orient="index").rename_axis("kind")


def by_axis(rows: Iterable[Row], order: Sequence[str] | None = None) -> pd.DataFrame:
    """A line for each arm: its loss, the time and the peak memory of a step, and MiB that a rank receives by axis;
    along `several` axes at once where copies lie so, and `counts` for whole stages and the world."""
    found = frame(rows, order).set_index("arm")
    received = found.filter(like="wire_bytes_").rename(columns=lambda c: c.removeprefix("wire_bytes_")) / MIB
    several = [axis for axis in map(str, received) if "*" in axis]
    table = found[["ranks", "loss", "step_ms_median"]].rename(columns={"step_ms_median": "step (ms)"})
    table = table.assign(**{"peak (MiB)": found.peak_bytes / MIB}, **received[list(AXIS_SECTIONS)])
    return table.assign(several=received[several].sum(axis=1), counts=received[["stage", "world"]].sum(axis=1))


def page(rows: Sequence[Row], large: RunConfig, degree: int, order: Sequence[str] | None = None) -> str:
    """Both tables in Markdown, with what a reader must know."""
    table = differences(rows, large, degree)
    text = _text(table, {"bubble": "{:.0%}"} | dict.fromkeys(SHARES, "{:.2f}"))
    parts = ["# What each axis costs and buys", _text(by_axis(rows, order), {"loss": "{:.4f}", "ranks": "{:d}"})]
    parts += [
        "Peak: of the fullest rank. By axis: MiB that a rank receives in a step; `several`: along several at once."
    ]
    parts += ["## Core differences", text, "\n".join(f"- {note}" for note in _notes(large, degree))]
    return "\n\n".join(parts) + "\n"


def _notes(large: RunConfig, degree: int) -> Sequence[str]:
    train, links = large.train, ", ".join(f"{name} {speed:g} GB/s" for name, speed in LINKS.items())
    step = f"{train.global_batch} samples of {large.data.sequence:,} tokens in {train.microbatches} microbatches"
    return (
        "cuts: what a rank has only a part of, and has whole in the arm that the line is over: logical dims of "
        "parameters, layers, samples and tokens of a microbatch, tokens of the residual stream, or training state.",
        f"{', '.join(SHARES)}: of the fullest rank in the fullest moment of a step, over the same of that arm.",
        "received: of one rank in a step, along the axis; each label counts for its largest rank. where: its "
        "collectives and phases, MiB, those below a hundredth left out.",
        "bubble: share of all ranks' time in which they wait for a stage, simulated with equal times of forward and "
        "both backwards.",
        f"needs: GB/s into a rank at which its traffic takes as long as its work, for {large.model.preset} on {degree} "
        f"ranks of the axis alone, {step}, at {TFLOPS:g} TFLOP/s of a device; by closed formula.",
        f"link: the slowest that gives so much, of {links}; what cannot be hidden behind work needs a faster one.",
    )


def cuts(config: RunConfig) -> set[str]:
    """What rank 0 has only a part of: dims of parameters, layers, samples and tokens of a microbatch, and its tokens
    where only the residual stream is cut."""
    rows = config.train.global_batch // config.train.microbatches
    ids = torch.zeros(rows, config.data.sequence, dtype=torch.int64)
    whole = Batch(ids, ids, torch.arange(config.data.sequence).expand_as(ids), ids)
    world = total_ranks(config)
    with fake_process_group(world, 0), torch.device("meta"):
        declared = specs(Decoder(config.model))
    with fake_process_group(world, 0):
        mesh = Mesh.from_config(config, world, 0, fake=True)
        batch = cut_batch(whole, config, mesh)
        stream = wired(config, mesh).residual(batch.tokens)
        layouts = [layout_of(spec, mesh) for spec in declared.values()]
    found = {d for layout in layouts for d, s in zip(layout.dims, layout.split, strict=True) if s and s[1] > 1}
    parts = {
        "layers": len(staged(config).stages(config)) > 1,
        "samples": batch.tokens.shape[0] < rows,
        "tokens": batch.tokens.shape[1] < config.data.sequence,
        "tokens of the residual stream": stream.numel() < batch.tokens.numel(),
    }
    return found | {name for name, cut in parts.items() if cut}


def bubble(config: RunConfig) -> float:
    """Of the config's schedule, where forward and both backwards take as long."""
    schedule = schedule_of(config.pp, config.train.microbatches)
    return simulate(schedule, even(schedule, 1, 1, 1)).bubble


def in_place_of(config: RunConfig, large: RunConfig, degree: int) -> RunConfig:
    """The large model in the layout of `config`, axes of which have `degree` ranks."""
    sections = {axis: getattr(config, axis) for axis in AXIS_SECTIONS}
    wider = {a: dataclasses.replace(s, degree=degree if s.degree > 1 else 1) for a, s in sections.items()}
    return dataclasses.replace(large, **wider)


def work(config: RunConfig) -> int:
    """FLOPs of a step of all ranks, forward and backward, without recompute."""
    with torch.device("meta"):
        declared = specs(Decoder(config.model))
    tokens = config.train.global_batch * config.data.sequence
    return flops_per_token(config.model, declared, config.data.sequence, causal=True) * tokens


def along(config: RunConfig, axis: str) -> Fraction:
    """Bytes that a rank receives along the axis in a step, by formula; also sums of gradients, where their copies lie
    along no other axis."""
    found = sum(TRAFFIC[axis](config).values(), Fraction())
    return found + sum(of_dp(config).values()) if axis != "dp" and config.dp.degree == 1 else found


TRAFFIC: Mapping[str, Callable[[RunConfig], Mapping[str, Fraction]]] = {
    "dp": of_dp,
    "tp": of_tp,
    "pp": of_pp,
    "cp": of_cp,
    "ep": of_ep,
}


def _where(labels: Mapping[str, float]) -> str:
    """The largest first: all_gather F 9.0, reduce_scatter BW 5.0"""
    sums: Counter[str] = Counter()
    for label, nbytes in labels.items():
        sums[" ".join(label.split("/")[1:])] += nbytes  # type: ignore[assignment]
    return ", ".join(f"{where} {n / MIB:.3g}" for where, n in sums.most_common() if n > sums.total() / 100)


def _text(table: pd.DataFrame, formats: Mapping[str, str]) -> str:
    """Markdown: numbers to three digits where `formats` says nothing else."""
    sides = ["right" if pd.api.types.is_numeric_dtype(table[c]) else "left" for c in table]
    cells = {c: [_cell(v, formats.get(str(c))) for v in table[c]] for c in table}
    shown = pd.DataFrame(cells, index=table.index)
    return str(shown.to_markdown(colalign=["left", *sides], disable_numparse=True))


def _cell(value: object, form: str | None) -> str:
    if isinstance(value, str):
        return value
    return form.format(value) if form else number(value)  # type: ignore[arg-type]
