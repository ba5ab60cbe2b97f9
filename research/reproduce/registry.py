"""Papers whose figures are reproduced."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from research.reproduce import controllable_memory, dualpipe, gpipe, zero, zero_bubble
from research.reproduce.cells import Cell

Paper = Callable[[Path], Iterable[Cell]]  # folder of published figures -> every cell

PAPERS: Mapping[str, Paper] = {
    "zero_bubble": zero_bubble.cells,
    "controllable_memory": controllable_memory.cells,
    "dualpipe": dualpipe.cells,
    "gpipe": gpipe.cells,
    "zero": zero.cells,
}
