"""Closed formulas of an axis's traffic beside what runs have counted."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction

import pandas as pd

from research.config import RunConfig
from research.record import Row
from research.report.lines import arm_of, arranged
from research.settings import from_mapping

Traffic = Callable[[RunConfig], Mapping[str, Fraction]]


def config_of(row: Row) -> RunConfig:
    """The config of a run, typed again."""
    return from_mapping(row.config)


def against(rows: Iterable[Row], axis: str, traffic: Traffic, order: Sequence[str] | None = None) -> pd.DataFrame:
    """A line for each arm and label (purpose/op/phase) that the formula knows: bytes that a rank receives along `axis`
    in a step, by `traffic` of the row's config, and as the run counted them."""
    lines = {
        (arm_of(row), label): (float(nbytes), row.comm_bytes.get(axis, {}).get(label, 0.0))
        for row in arranged(rows, order)
        for label, nbytes in traffic(config_of(row)).items()
    }
    index = pd.MultiIndex.from_tuples(lines, names=["arm", "purpose/op/phase"])
    return pd.DataFrame(list(lines.values()), index=index, columns=["by formula", "counted"])


def by_formula(configs: Mapping[str, RunConfig], traffic: Traffic) -> pd.DataFrame:
    """A line for each named config: bytes that one rank receives in a step, a column for each purpose and phase."""
    lines = {}
    for name, config in configs.items():
        line: defaultdict[str, float] = defaultdict(float)
        for label, nbytes in traffic(config).items():
            purpose, _, phase = label.split("/")
            line[f"{purpose}, {phase}"] += float(nbytes)
        lines[name] = line
    return pd.DataFrame.from_dict(lines, orient="index").fillna(0.0).rename_axis("layout")
