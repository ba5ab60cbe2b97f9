"""Rows grouped into the lines of a table: one line holds what differs in nothing but the seed."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

from research.config import AXIS_SECTIONS, Value
from research.record import NOT_IDENTITY, Kind, Row, config_hash


@dataclass(frozen=True)
class Line:
    """Rows of one arm, kind, device and config; several where the arm ran with several seeds."""

    name: str  # the arm, numbered where one arm makes several lines
    rows: list[Row]

    @property
    def arm(self) -> str:
        return arm_of(self.rows[0])

    @property
    def kind(self) -> Kind:
        return self.rows[0].kind

    def mean(self, of: Callable[[Row], float]) -> float:
        return statistics.fmean(map(of, self.rows))

    def spread(self, of: Callable[[Row], float]) -> float | None:
        """Sample standard deviation over the seeds; None of a single row or of values that are not finite."""
        values = [of(r) for r in self.rows]
        return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None


def arm_of(row: Row) -> str:
    """Name of the row's arm; a run outside any ablation goes by its run_id."""
    return row.arm or row.run_id


def layout(row: Row) -> str:
    """Degrees above 1, outermost axis first, such as "pp2 dp4"; "one process" where there are none."""
    sizes: dict[str, Value] = {axis: row.config.get(axis, {}).get("degree", 1) for axis in AXIS_SECTIONS}
    sizes["etp"] = row.config.get("ep", {}).get("tensor", 1)
    return " ".join(f"{axis}{n}" for axis, n in sizes.items() if isinstance(n, int) and n > 1) or "one process"


def arranged(rows: Iterable[Row], order: Sequence[str] | None = None) -> list[Row]:
    """Rows by arm as in `order`, then the other arms from few ranks to many; within an arm by kind and seed."""
    place = {arm: i for i, arm in enumerate(order or [])}
    kinds = get_args(Kind)

    def position(row: Row) -> tuple[int, int, str, int, int, str]:
        arm = arm_of(row)
        return place.get(arm, len(place)), row.hardware.ranks, arm, kinds.index(row.kind), row.seed, row.run_id

    return sorted(rows, key=position)


def lines(rows: Iterable[Row], order: Sequence[str] | None = None) -> list[Line]:
    """The lines of a table over `rows`, arms as in `order`. Raises ValueError where there are no rows."""
    groups: dict[tuple[str, str, str, str, str], list[Row]] = {}
    for row in arranged(rows, order):
        groups.setdefault(_alike(row), []).append(row)
    if not groups:
        raise ValueError("no rows to report on")
    total = Counter(arm for arm, *_ in groups)
    met: Counter[str] = Counter()
    found = []
    for (arm, *_), group in groups.items():
        met[arm] += 1
        found.append(Line(arm if total[arm] == 1 else f"{arm} ({met[arm]})", group))
    return found


def ratio(line: Line, baseline: str, among: Sequence[Line]) -> float | None:
    """Tokens/s of `line` over those of arm `baseline`.

    None where that arm has no line, or more than one, of the same kind and device: such a ratio would mislead.
    """
    same = [b for b in among if b.arm == baseline and (b.kind, _device(b)) == (line.kind, _device(line))]
    below = same[0].mean(lambda r: r.tokens_per_s) if len(same) == 1 else 0.0
    return line.mean(lambda r: r.tokens_per_s) / below if below > 0 else None


def loss_gap(rows: Iterable[Row]) -> float:
    """How far apart, in nats, the losses of any two rows are at any step that both have made."""
    return max((max(step) - min(step) for step in zip(*(r.losses for r in rows), strict=False)), default=0.0)


def differences(among: Sequence[Line]) -> list[str]:
    """What tells lines apart, the seed aside: kind, device, config keys."""
    traits = [_traits(line.rows[0]) for line in among]
    names = dict.fromkeys(name for t in traits for name in t)
    return [n for n in names if len({repr(t.get(n)) for t in traits}) > 1]


def _traits(row: Row) -> dict[str, Value]:
    keys = {f"{s}.{k}": v for s, section in _computed(row).items() for k, v in section.items()}
    return {"kind": row.kind, "device": row.hardware.device, "text": row.corpus, **keys}


def _computed(row: Row) -> dict[str, dict[str, Value]]:
    """The config without the seed and without the keys that change neither a result nor a measurement."""
    aside = {*NOT_IDENTITY, "train.seed"}
    return {
        section: {key: value for key, value in keys.items() if f"{section}.{key}" not in aside}
        for section, keys in row.config.items()
    }


def _alike(row: Row) -> tuple[str, str, str, str, str]:
    return arm_of(row), row.kind, row.hardware.device, row.corpus, config_hash(_computed(row))


def _device(line: Line) -> str:
    return line.rows[0].hardware.device
