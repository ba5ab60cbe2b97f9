"""Pictures for notebooks that are kept with their outputs: PNG of few colours, a third of the usual size."""

import io
from dataclasses import dataclass

from matplotlib.figure import Figure
from PIL import Image

COLOURS = 64  # enough for text with soft edges on the fills of a diagram


@dataclass(frozen=True)
class Picture:
    """What Jupyter shows of itself."""

    png: bytes
    width: int
    height: int

    def _repr_png_(self) -> bytes:
        return self.png

    def __repr__(self) -> str:
        return f"<picture of {self.width} x {self.height}>"


def small(figure: Figure, dpi: float = 90) -> Picture:
    """The figure as it looks, in few bytes. For drawings of plain fills: shades of a heat map would become steps."""
    full, out = io.BytesIO(), io.BytesIO()
    figure.savefig(full, format="png", dpi=dpi)
    image = Image.open(full).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    image.save(out, format="png", optimize=True)
    return Picture(out.getvalue(), *image.size)
