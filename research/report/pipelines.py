"""Runs in pipeline stages beside the simulation of their schedules: a table, and timelines as pictures."""

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from research.parallel.pp import schedule_of
from research.parallel.pp.check import check
from research.parallel.pp.draw import picture
from research.parallel.pp.simulate import Timeline, even, simulate
from research.record import Row
from research.report.facts import is_cut
from research.report.formulas import config_of
from research.report.lines import Line, differences, lines
from research.report.tables import ABSENT, MIB, number

NOTES = """\
- Simulated: every rank has a core of its own and as much work, a forward and both halves of a backward take as long,
  nothing is sent. A run that differs in `pp` alone and has no stages tells time and activations of the whole model.
- Bubble: what the rank that waits longest for stages of others waits in a step (mean), as a share of the step (median).
- Activations: in the fullest moment of a step, of the rank that holds most."""
MEASURED = {
    "step_ms": ("step (ms)", 1),
    "bubble": ("bubble (%)", 0.01),
    "activations_bytes": ("activations (MiB)", MIB),
}
COLUMNS = ("schedule", "ranks", "microbatches", *(f"{name}{by}" for name in MEASURED for by in ("", "_simulated")))


def beside(rows: Iterable[Row], order: Sequence[str] | None = None) -> pd.DataFrame:
    """A line for each line of a table whose model is cut into stages. NaN where nothing tells what is simulated: no run
    without stages, or a schedule's file that has gone. Raises ValueError where there are no rows."""
    found = lines(rows, order)
    told = {line.name: {**_measured(line), **_simulated(line, found)} for line in found if is_cut(line.rows[0])}
    return pd.DataFrame.from_dict(told, orient="index").reindex(columns=list(COLUMNS)).rename_axis("arm")


def section(rows: Iterable[Row], order: Sequence[str] | None = None) -> str:
    """`beside` in Markdown, with what a reader must know."""
    table = beside(rows, order)
    shown = table[["schedule"]].assign(ranks=table.ranks.map(str), microbatches=table.microbatches.map(str))
    for name, (label, unit) in MEASURED.items():
        shown[label] = [_cell(x / unit) for x in table[name]]
        shown[f"{label}, simulated"] = [_cell(x / unit) for x in table[f"{name}_simulated"]]
    text = shown.to_markdown(colalign=["left"] * 2 + ["right"] * 8, disable_numparse=True)
    return f"## Pipelines beside their simulation\n\n{text}\n\n{NOTES}\n"


def timelines(rows: Iterable[Row], order: Sequence[str] | None = None) -> dict[str, list[Timeline]]:
    """The schedules of the rows, simulated with equal times; by ranks and microbatches, such as "pp4-8"."""
    found: dict[str, dict[tuple[str, int], Timeline]] = {}
    for line in lines(rows, order):
        if is_cut(line.rows[0]) and (timeline := _timeline(line)) is not None:
            s = timeline.schedule
            found.setdefault(f"pp{s.ranks}-{s.microbatches}", {})[s.name, s.stages] = timeline
    return {name: list(each.values()) for name, each in found.items()}


def pictures(rows: Iterable[Row], order: Sequence[str] | None = None) -> dict[str, bytes]:
    """`timelines`, those of one name below each other on one scale, as PNG."""
    return {name: picture(each, "png") for name, each in timelines(rows, order).items()}


def _measured(line: Line) -> Mapping[str, object]:
    config = line.rows[0].config
    return {
        "schedule": config["pp"]["schedule"],
        "ranks": config["pp"]["degree"],
        "microbatches": config["train"]["microbatches"],
        "step_ms": line.mean(lambda r: r.step_ms),
        "bubble": line.mean(lambda r: r.exposed_comm_ms.get("pp", 0.0) / r.step_ms),
        "activations_bytes": line.mean(_activations),
    }


def _simulated(line: Line, among: Sequence[Line]) -> Mapping[str, float]:
    timeline = _timeline(line)
    if timeline is None:
        return {}
    schedule, told = timeline.schedule, {"bubble_simulated": timeline.bubble}
    for one in among:
        if not is_cut(one.rows[0]) and all(name.startswith("pp.") for name in differences([line, one])):
            told["step_ms_simulated"] = one.mean(lambda r: r.step_ms) / (schedule.ranks * (1 - timeline.bubble))
            share = max(check(schedule).live) / schedule.stages  # without stages one microbatch is alive
            told["activations_bytes_simulated"] = one.mean(_activations) * share
    return told


def _timeline(line: Line) -> Timeline | None:
    try:
        config = config_of(line.rows[0])
        schedule = schedule_of(config.pp, config.train.microbatches)
    except ValueError:  # a file that has gone, or keys of other code
        return None
    return simulate(schedule, even(schedule, 1, 1, 1))


def _activations(row: Row) -> float:
    return max(peaks.get("activations", 0) for peaks in row.rank_peak_bytes)


def _cell(x: float) -> str:
    return ABSENT if pd.isna(x) else number(x)
