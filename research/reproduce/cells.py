"""A published figure beside ours."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Cell:
    """One figure of a table. It matches within `within` either way; or, where theirs is known to be another measure, in
    `between`: the stated relative difference, from and to."""

    table: str
    row: str
    column: str
    theirs: float
    ours: float
    within: float = 1e-9
    between: tuple[float, float] | None = None

    @property
    def difference(self) -> float:
        return self.ours - self.theirs

    @property
    def matches(self) -> bool:
        if self.between is not None:
            return self.between[0] <= self.difference / self.theirs <= self.between[1]
        return abs(self.difference) <= self.within


def table(papers: Path, paper: str, title: str) -> list[dict[str, Any]]:
    """Rows of the one table whose title starts so, by column, of a file of published figures."""
    text = (papers / f"{paper}.yaml").read_text(encoding="utf-8")
    (found,) = (t for t in yaml.safe_load(text) if t["table"].startswith(title))
    return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


def known(formulas: Mapping[str, float], text: str) -> float:
    """What a printed formula comes to. Raises ValueError for one that is not among those written out in code."""
    if text not in formulas:
        raise ValueError(f"formula {text!r} is not known; known: {', '.join(formulas)}")
    return formulas[text]
