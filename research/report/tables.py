"""Tables of rows: a data frame for further work, a Markdown page for people."""

import math
from collections.abc import Callable, Iterable, Sequence

import pandas as pd

from research.config import AXIS_SECTIONS
from research.record import Hardware, Row
from research.report.lines import Line, arm_of, arranged, differences, layout, lines, ratio

MIB = 2**20
ABSENT = "–"
TRAFFIC = ("axis", "purpose/op/phase")
DEFINITIONS = (
    "Loss: cross-entropy of the last step, nats per token; below the unigram entropy of the corpus, context is used.",
    "Step: median and interquartile range (IQR), warm-up left out, as in tokens/s.",
    "Peak: bytes in the fullest moment of a step, of the rank that needs most.",
    "Received: bytes of one rank in one step; each axis counts for its largest rank.",
    "Bold: best of its kind.",
)


def frame(rows: Iterable[Row], order: Sequence[str] | None = None) -> pd.DataFrame:
    """One line a row, arms as in `order`; units stand in the column names, loss and entropy are in nats per token.

    `wire_bytes` adds up axes, each the largest over ranks: an upper bound of one rank.
    """
    found = arranged(rows, order)
    axes = _axes(found)
    return pd.DataFrame(
        [
            {
                "ablation": r.ablation,
                "arm": arm_of(r),
                "seed": r.seed,
                "kind": r.kind,
                "ranks": r.hardware.ranks,
                "layout": layout(r),
                "loss": r.loss,
                **{f"loss_depth_{k}": _loss_of_depth(r, k) for k in _depths(found)},
                "unigram_entropy": r.unigram_entropy,
                "tokens_per_s": r.tokens_per_s,
                "step_ms_median": r.step_ms,
                "step_ms_iqr": r.step_ms_iqr,
                "peak_bytes": _peak_bytes(r),
                **{f"wire_bytes_{axis}": sum(r.comm_bytes.get(axis, {}).values()) for axis in axes},
                "wire_bytes": _wire_bytes(r),
                "tokens": r.tokens,
                "parameters": r.parameters,
                "commit": _commit(r),
            }
            for r in found
        ]
    )


def wire_frame(rows: Iterable[Row], order: Sequence[str] | None = None) -> pd.DataFrame:
    """Bytes that a rank receives in one step (mean over seeds): one line per axis and purpose/op/phase, one column
    per line of the table; NaN where there was no such traffic. Raises ValueError where there are no rows."""
    found = lines(rows, order)
    labels = [
        (axis, label)
        for axis in _axes(r for line in found for r in line.rows)
        for label in sorted({label for line in found for r in line.rows for label in r.comm_bytes.get(axis, {})})
    ]
    columns = {line.name: [_label_bytes(line, axis, label) for axis, label in labels] for line in found}
    index = pd.MultiIndex.from_tuples(labels, names=TRAFFIC) if labels else None
    return pd.DataFrame(columns, index=index, dtype=float)


def markdown(rows: Iterable[Row], title: str, order: Sequence[str] | None = None) -> str:
    """A page with the comparison, the traffic by label, and what a reader must know to trust them.

    Its bytes depend on the rows only, not on their order. The first arm of `order` (else the one with the fewest
    ranks) is the baseline of the ratios. Raises ValueError where there are no rows.
    """
    found = lines(rows, order)
    baseline = order[0] if order else found[0].arm
    parts = [f"# {title}", _comparison(found, baseline), _caption(found)]
    parts += ["\n".join(f"- {note}" for note in _notes(found, order or [], baseline))]
    parts += ["## Traffic: MiB that a rank receives in one step", _traffic(wire_frame(rows, order))]
    return "\n\n".join(parts) + "\n"


def _comparison(found: Sequence[Line], baseline: str) -> str:
    times = [ratio(line, baseline, found) for line in found]
    columns = {
        "arm": [line.name for line in found],
        "kind": [str(line.kind) for line in found],
        "layout": [layout(line.rows[0]) for line in found],
        "ranks": [str(line.rows[0].hardware.ranks) for line in found],
        "seeds": [str(len(line.rows)) for line in found],
        "loss (nats)": _cells(found, lambda r: r.loss, _fixed, min),
        **{f"of depth {k} (nats)": _depth_cells(found, k) for k in _depths(r for line in found for r in line.rows)},
        "unigram entropy (nats)": _cells(found, lambda r: r.unigram_entropy, _fixed),
        "tokens/s": _cells(found, lambda r: r.tokens_per_s, number, max),
        f"over {baseline}": [ABSENT if t is None else f"{t:.2f}×" for t in times],
        "step (ms)": _cells(found, lambda r: r.step_ms, number, min),
        "IQR (ms)": _cells(found, lambda r: r.step_ms_iqr, number),
        "peak (MiB)": _cells(found, lambda r: _peak_bytes(r) / MIB, number, min),
        "received (MiB)": _cells(found, lambda r: _wire_bytes(r) / MIB, number, min),
    }
    return _table(columns, text_columns=3)


def _cells(
    found: Sequence[Line],
    of: Callable[[Row], float],
    show: Callable[[float], str],
    best: Callable[[list[float]], float] | None = None,
) -> list[str]:
    """Mean, and spread over seeds. Bold: the best of its kind and all that read the same, unless that is all."""
    means = [line.mean(of) for line in found]
    cells = [show(m) for m in means]
    bold = set()
    for kind in {line.kind for line in found} if best else ():
        places = [i for i, line in enumerate(found) if line.kind == kind and math.isfinite(means[i])]
        winners = {i for i in places if best and cells[i] == show(best([means[j] for j in places]))}
        bold |= winners if len(winners) < len(places) else set()
    spreads = [line.spread(of) for line in found]
    cells = [f"{c} ± {show(s)}" if s else c for c, s in zip(cells, spreads, strict=True)]
    return [f"**{c}**" if i in bold else c for i, c in enumerate(cells)]


def _depth_cells(found: Sequence[Line], depth: int) -> list[str]:
    cells = _cells(found, lambda r: _loss_of_depth(r, depth), _fixed, min)
    return [c if depth in _depths(line.rows) else ABSENT for c, line in zip(cells, found, strict=True)]


def _caption(found: Sequence[Line]) -> str:
    facts: dict[str, Callable[[Row], str]] = {
        "Hardware": lambda r: _hardware(r.hardware),
        "Commit": _commit,
        "Parameters": lambda r: _count(r.parameters),
        "Tokens trained on": lambda r: _count(r.tokens),
    }
    told = [f"{name}: {_by_value(found, of)}." for name, of in facts.items()]
    told.append(f"Lines differ in: {', '.join(differences(found)) or 'nothing but the seed'}.")
    return "  \n".join(told)


def _by_value(found: Sequence[Line], of: Callable[[Row], str]) -> str:
    """The one value of all rows, or each value with the lines that have it."""
    names: dict[str, list[str]] = {}
    for line in found:
        for value in sorted({of(r) for r in line.rows}):
            names.setdefault(value, []).append(line.name)
    return "; ".join(v if len(names) == 1 else f"{v} ({', '.join(n)})" for v, n in names.items())


def _notes(found: Sequence[Line], wanted: Sequence[str], baseline: str) -> list[str]:
    by_arm: dict[str, list[Line]] = {}
    for line in found:
        by_arm.setdefault(line.arm, []).append(line)
    notes = list(DEFINITIONS)
    if any(len(line.rows) > 1 for line in found):
        notes.append("Means over the seeds; ±: their sample standard deviation, where it is not 0.")
    if any(ratio(line, baseline, found) is None for line in found):
        notes.append(f"No ratio where {baseline} has no single line of the same kind and device.")
    notes += [
        f"{', '.join(line.name for line in same)}: lines of one arm that differ in {', '.join(differences(same))}."
        for same in by_arm.values()
        if len(same) > 1
    ]
    notes += [f"{arm}: wanted, but there is no row." for arm in wanted if arm not in by_arm]
    if others := [arm for arm in by_arm if wanted and arm not in wanted]:
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


def _axes(rows: Iterable[Row]) -> list[str]:
    """Axes with traffic in any of the rows, in the order of the config."""
    used = {axis for r in rows for axis in r.comm_bytes}
    return [a for a in AXIS_SECTIONS if a in used] + sorted(used - set(AXIS_SECTIONS))


def _depths(rows: Iterable[Row]) -> range:
    """Depths of multi-token prediction that any of the rows has."""
    return range(1, max(len(r.mtp_losses) for r in rows) + 1)


def _loss_of_depth(row: Row, depth: int) -> float:
    """Of the last step; NaN where the row has no such depth."""
    return row.mtp_losses[depth - 1][-1] if depth <= len(row.mtp_losses) else math.nan


def _label_bytes(line: Line, axis: str, label: str) -> float:
    if not any(label in r.comm_bytes.get(axis, {}) for r in line.rows):
        return math.nan
    return line.mean(lambda r: r.comm_bytes.get(axis, {}).get(label, 0.0))


def _peak_bytes(row: Row) -> int:
    return sum(row.peak_bytes.values())


def _wire_bytes(row: Row) -> float:
    return sum(sum(labels.values()) for labels in row.comm_bytes.values())


def _hardware(h: Hardware) -> str:
    nodes, threads = _several(h.nodes, "node"), _several(h.threads, "thread")
    return f"{h.device}, {nodes}, {threads} a rank, torch {h.torch}, Python {h.python}"


def _several(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _commit(row: Row) -> str:
    return (row.commit or "no checkout") + (" with local changes" if row.dirty else "")


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
