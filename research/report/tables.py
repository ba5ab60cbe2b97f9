"""Tables of rows: a data frame for further work, a Markdown page for people."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from research.record import Row
from research.report.absent import Absent, repeat_of
from research.report.facts import (
    axes,
    commit,
    depths,
    hardware,
    has_experts,
    loss_of_depth,
    max_violation,
    peak_bytes,
    wire_bytes,
)
from research.report.lines import Line, arm_of, arranged, differences, layout, lines, ratio

MIB = 2**20
ABSENT = "–"
TRAFFIC = ("axis", "purpose/op/phase")
DEFINITIONS = (
    "Loss: cross-entropy of the last step, nats per token; below the unigram entropy of the corpus, context is used.",
    "Step: median and interquartile range (IQR), warm-up left out, as in tokens/s.",
    "Peak: bytes in the fullest moment of a step, of the rank that needs most.",
    "Received: bytes of one rank in one step; each axis counts for its largest rank.",
    "Bold: best of its kind, of those that have trained on as many tokens of one text.",
)
MAX_VIOLATION = (
    "MaxVio: choices of the busiest expert over the mean of all, less 1, of the whole run (Wang et al. 2024, eq. 4); "
    "mean over MoE layers."
)


@dataclass(frozen=True)
class Page:
    """A comparison as text, for any format: `**x**` is bold."""

    title: str
    columns: dict[str, list[str]]
    text_columns: int
    facts: list[str]
    notes: list[str]
    footnotes: list[str]  # [1], [2] ..: of arms without a row


def frame(rows: Iterable[Row], order: Sequence[str] | None = None, absent: Sequence[Absent] = ()) -> pd.DataFrame:
    """One line a row, arms as in `order`, then one for each run that has none; units stand in the column names, loss
    and entropy are in nats per token.

    `wire_bytes` adds up axes, each the largest over ranks: an upper bound of one rank.
    """
    found = arranged(rows, order)
    lines = [_fields(r, found) for r in found]
    whole = {name: "Int64" for line in lines[:1] for name, value in line.items() if isinstance(value, int)}
    names = ("arm", "seed", "repeat", "state", "error", "evidence")
    missing = [{"ablation": found[0].ablation} | {n: getattr(a, n) for n in names} for a in absent if found]
    return pd.DataFrame([*lines, *missing]).astype(whole if missing else {})


def _fields(r: Row, among: Sequence[Row]) -> dict[str, object]:
    return {
        "ablation": r.ablation,
        "arm": arm_of(r),
        "seed": r.seed,
        "repeat": repeat_of(r),
        "state": "done",
        "kind": r.kind,
        "hardware": hardware(r.hardware),
        "ranks": r.hardware.ranks,
        "layout": layout(r),
        "loss": r.loss,
        **{f"loss_depth_{k}": loss_of_depth(r, k) for k in depths(among)},
        "unigram_entropy": r.unigram_entropy,
        "tokens_per_s": r.tokens_per_s,
        "step_ms_median": r.step_ms,
        "step_ms_iqr": r.step_ms_iqr,
        "peak_bytes": peak_bytes(r),
        **{f"wire_bytes_{axis}": sum(r.comm_bytes.get(axis, {}).values()) for axis in axes(among)},
        "wire_bytes": wire_bytes(r),
        **({"max_violation": max_violation(r)} if has_experts(among) else {}),
        "tokens": r.tokens,
        "parameters": r.parameters,
        "commit": commit(r),
        "error": math.nan,
        "evidence": "row written",
    }


def wire_frame(rows: Iterable[Row], order: Sequence[str] | None = None) -> pd.DataFrame:
    """Bytes that a rank receives in one step (mean over seeds): one line per axis and purpose/op/phase, one column
    per line of the table; NaN where there was no such traffic. Raises ValueError where there are no rows."""
    found = lines(rows, order)
    labels = [
        (axis, label)
        for axis in axes(r for line in found for r in line.rows)
        for label in sorted({label for line in found for r in line.rows for label in r.comm_bytes.get(axis, {})})
    ]
    columns = {line.name: [_label_bytes(line, axis, label) for axis, label in labels] for line in found}
    index = pd.MultiIndex.from_tuples(labels, names=TRAFFIC) if labels else None
    return pd.DataFrame(columns, index=index, dtype=float)


def markdown(
    rows: Iterable[Row],
    title: str,
    order: Sequence[str] | None = None,
    baseline: str = "",
    absent: Sequence[Absent] = (),
) -> str:
    """A page with the comparison, the traffic by label, and what a reader must know to trust them.

    Its bytes depend on the arguments only, not on the order of the rows. Raises ValueError where there are no rows.
    """
    rows = list(rows)
    page = comparison(rows, title, order, baseline, absent)
    parts = [f"# {title}", _table(page.columns, page.text_columns), "  \n".join(page.facts)]
    parts += ["\n".join(f"- {note}" for note in [*page.footnotes, *page.notes])]
    parts += ["## Traffic: MiB that a rank receives in one step", _traffic(wire_frame(rows, order))]
    return "\n\n".join(parts) + "\n"


def comparison(
    rows: Iterable[Row],
    title: str,
    order: Sequence[str] | None = None,
    baseline: str = "",
    absent: Sequence[Absent] = (),
) -> Page:
    """A line for each arm, in `order`, those without a row too. Ratios are over arm `baseline`, else over the first of
    the order, else over the one with the fewest ranks. Raises ValueError where there are no rows."""
    order, found = order or (), lines(rows, order)
    baseline = baseline or (order[0] if order else found[0].arm)
    columns = _columns(found, baseline)
    footnotes = list(_footnotes(found, order, absent))
    for number, (arm, _) in enumerate(footnotes, 1):
        at = sum(_place(line.arm, order) <= _place(arm, order) for line in found)
        for name, cells in columns.items():
            cells.insert(at + number - 1, f"{arm} [{number}]" if name == "arm" else ABSENT)
    told = [f"[{number}] {arm}: {why}." for number, (arm, why) in enumerate(footnotes, 1)]
    return Page(title, columns, 3, _facts(found), _notes(found, order, absent, baseline), told)


def _place(arm: str, order: Sequence[str]) -> int:
    return order.index(arm) if arm in order else len(order)


def _footnotes(found: Sequence[Line], order: Sequence[str], absent: Sequence[Absent]) -> Iterator[tuple[str, str]]:
    """Arms without any row, in order, and why."""
    there = {line.arm for line in found}
    for arm in dict.fromkeys([*order, *(a.arm for a in absent)]):
        if arm not in there:
            runs = [a for a in absent if a.arm == arm]
            reasons = dict.fromkeys(a.why for a in runs)
            told = [why if len(reasons) == 1 else f"{_which(runs, why)} {why}" for why in reasons]
            yield arm, "; ".join(told) or "there is no row"


def _which(runs: Sequence[Absent], why: str) -> str:
    return ", ".join(a.name for a in runs if a.why == why)


def _columns(found: Sequence[Line], baseline: str) -> dict[str, list[str]]:
    times, rows = [ratio(line, baseline, found) for line in found], [r for line in found for r in line.rows]
    return {
        "arm": [line.name for line in found],
        "kind": [str(line.kind) for line in found],
        "layout": [layout(line.rows[0]) for line in found],
        "ranks": [str(line.rows[0].hardware.ranks) for line in found],
        "runs": [str(len(line.rows)) for line in found],
        "loss (nats)": _cells(found, lambda r: r.loss, _fixed, min),
        **{f"of depth {k} (nats)": _depth_cells(found, k) for k in depths(rows)},
        "unigram entropy (nats)": _cells(found, lambda r: r.unigram_entropy, _fixed),
        "tokens/s": _cells(found, lambda r: r.tokens_per_s, number, max),
        f"over {baseline}": [ABSENT if t is None else f"{t:.2f}×" for t in times],
        "step (ms)": _cells(found, lambda r: r.step_ms, number, min),
        "IQR (ms)": _cells(found, lambda r: r.step_ms_iqr, number),
        "peak (MiB)": _cells(found, lambda r: peak_bytes(r) / MIB, number, min),
        "received (MiB)": _cells(found, lambda r: wire_bytes(r) / MIB, number, min),
        **({"MaxVio": _violation_cells(found)} if has_experts(rows) else {}),
    }


def _cells(
    found: Sequence[Line],
    of: Callable[[Row], float],
    show: Callable[[float], str],
    best: Callable[[list[float]], float] | None = None,
) -> list[str]:
    """Mean, and spread over runs. Bold: the best among equals and all that read the same, unless that is all."""
    means = [line.mean(of) for line in found]
    cells = [show(m) for m in means]
    bold = set()
    for equal in {_equals(line) for line in found} if best else ():
        places = [i for i, line in enumerate(found) if _equals(line) == equal and math.isfinite(means[i])]
        winners = {i for i in places if best and cells[i] == show(best([means[j] for j in places]))}
        bold |= winners if len(winners) < len(places) else set()
    spreads = [line.spread(of) for line in found]
    cells = [f"{c} ± {show(s)}" if s else c for c, s in zip(cells, spreads, strict=True)]
    return [f"**{c}**" if i in bold else c for i, c in enumerate(cells)]


def _equals(line: Line) -> tuple[str, str, int]:
    """Lines between which one may be called the best."""
    return line.kind, line.rows[0].corpus, line.rows[0].tokens


def _depth_cells(found: Sequence[Line], depth: int) -> list[str]:
    cells = _cells(found, lambda r: loss_of_depth(r, depth), _fixed, min)
    return _where(lambda rows: depth in depths(rows), found, cells)


def _violation_cells(found: Sequence[Line]) -> list[str]:
    return _where(has_experts, found, _cells(found, max_violation, number, min))


def _where(there: Callable[[Sequence[Row]], bool], found: Sequence[Line], cells: Sequence[str]) -> list[str]:
    """The cells of lines whose rows have such a value."""
    return [c if there(line.rows) else ABSENT for c, line in zip(cells, found, strict=True)]


def _facts(found: Sequence[Line]) -> list[str]:
    facts: dict[str, Callable[[Row], str]] = {
        "Hardware": lambda r: hardware(r.hardware),
        "Commit": commit,
        "Parameters": lambda r: _count(r.parameters),
        "Tokens trained on": lambda r: _count(r.tokens),
    }
    told = [f"{name}: {_by_value(found, of)}." for name, of in facts.items()]
    return [*told, f"Lines differ in: {', '.join(differences(found)) or 'nothing but the seed'}."]


def _by_value(found: Sequence[Line], of: Callable[[Row], str]) -> str:
    """The one value of all rows, or each value with the lines that have it."""
    names: dict[str, list[str]] = {}
    for line in found:
        for value in sorted({of(r) for r in line.rows}):
            names.setdefault(value, []).append(line.name)
    return "; ".join(v if len(names) == 1 else f"{v} ({', '.join(n)})" for v, n in names.items())


def _notes(found: Sequence[Line], order: Sequence[str], absent: Sequence[Absent], baseline: str) -> list[str]:
    by_arm: dict[str, list[Line]] = {}
    for line in found:
        by_arm.setdefault(line.arm, []).append(line)
    notes = [*DEFINITIONS, *([MAX_VIOLATION] if has_experts(r for line in found for r in line.rows) else [])]
    if any(len(line.rows) > 1 for line in found):
        notes.append(
            "Means over the runs, seeds and repetitions; ±: their sample standard deviation, where it is not 0."
        )
    if any(ratio(line, baseline, found) is None for line in found):
        notes.append(f"No ratio where {baseline} has no single line of the same kind and device.")
    notes += [
        f"{', '.join(line.name for line in same)}: lines of one arm that differ in {', '.join(differences(same))}."
        for same in by_arm.values()
        if len(same) > 1
    ]
    notes += [f"{a.arm}: without {a.name}, {a.why}." for a in absent if a.arm in by_arm]
    if others := [arm for arm in by_arm if order and arm not in order]:
        notes.append(f"{', '.join(others)}: has rows, but is no arm of this ablation.")
    skipped = {line.name: sum(r.skipped_steps for r in line.rows) for line in found}
    notes += [f"{name}: {n} steps skipped." for name, n in skipped.items() if n]
    short = [line.name for line in found if not all(r.timed_steps for r in line.rows)]
    return notes + [f"{name}: all steps were warm-up, so there is no speed." for name in short]


def _traffic(traffic: pd.DataFrame) -> str:
    if traffic.empty:
        return "Nothing crossed between ranks."
    sent = traffic.dropna(axis="columns", how="all")
    columns = {name: [str(part) for part in sent.index.get_level_values(name)] for name in TRAFFIC}
    for name in sent:
        columns[str(name)] = [ABSENT if math.isnan(b) else number(b / MIB) for b in sent[name]]
    return _table(columns, text_columns=2)


def _table(columns: dict[str, list[str]], text_columns: int) -> str:
    align = ["left"] * text_columns + ["right"] * (len(columns) - text_columns)
    return str(pd.DataFrame(columns).to_markdown(index=False, colalign=align, disable_numparse=True))


def _label_bytes(line: Line, axis: str, label: str) -> float:
    if not any(label in r.comm_bytes.get(axis, {}) for r in line.rows):
        return math.nan
    return line.mean(lambda r: r.comm_bytes.get(axis, {}).get(label, 0.0))


def _fixed(x: float) -> str:
    return f"{x:.4f}"


def number(x: float) -> str:
    """Three significant digits, or whole with thousands separators."""
    if x == 0 or not math.isfinite(x):
        return f"{x:g}"
    return f"{x:,.0f}" if abs(x) >= 99.95 else f"{x:#.3g}"


def _count(n: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:g}"
