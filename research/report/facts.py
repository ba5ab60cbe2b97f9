"""What tables tell of a row, beside what stands in it as it is."""

import math
import statistics
from collections.abc import Iterable

from research.config import AXIS_SECTIONS
from research.record import Hardware, Row


def axes(rows: Iterable[Row]) -> list[str]:
    """Axes with traffic in any of the rows, in the order of the config."""
    used = {axis for r in rows for axis in r.comm_bytes}
    return [a for a in AXIS_SECTIONS if a in used] + sorted(used - set(AXIS_SECTIONS))


def is_cut(row: Row) -> bool:
    """Whether the model is cut into stages."""
    return row.config.get("pp", {}).get("degree", 1) != 1


def depths(rows: Iterable[Row]) -> range:
    """Depths of multi-token prediction that any of the rows has."""
    return range(1, max(len(r.mtp_losses) for r in rows) + 1)


def loss_of_depth(row: Row, depth: int) -> float:
    """Of the last step; NaN where the row has no such depth."""
    return row.mtp_losses[depth - 1][-1] if depth <= len(row.mtp_losses) else math.nan


def has_experts(rows: Iterable[Row]) -> bool:
    """Whether any of the rows counted what experts were given."""
    return any(r.max_violation for r in rows)


def max_violation(row: Row) -> float:
    """MaxVio, mean over MoE layers; NaN where nothing was counted."""
    return statistics.fmean(row.max_violation.values()) if row.max_violation else math.nan


def peak_bytes(row: Row) -> int:
    return sum(row.peak_bytes.values())


def wire_bytes(row: Row) -> float:
    return sum(sum(labels.values()) for labels in row.comm_bytes.values())


def hardware(h: Hardware) -> str:
    nodes, threads = _several(h.nodes, "node"), _several(h.threads, "thread")
    return f"{h.device}, {nodes}, {threads} a rank, torch {h.torch}, Python {h.python}"


def _several(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def commit(row: Row) -> str:
    return (row.commit or "no checkout") + (" with local changes" if row.dirty else "")
