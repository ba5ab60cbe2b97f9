"""Write and print what each axis cuts, holds, sends and needs, from the rows of the ablation of all axes.

python -m experiments.axes                                # rows in results/rows
python -m experiments.axes results/reference/five_axes    # the committed ones
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from experiments.command import CHECKS
from research.ablation import read
from research.files import write_atomically
from research.record import load, select
from research.report.differences import page
from research.settings import load as load_config

HERE = Path(__file__).parent
ABLATION = HERE / "ablations" / "five_axes.yaml"
LARGE = HERE / "configs" / "mixtral_8x7b.yaml"  # whose traffic asks for links
DEGREE = 8


def main(words: Sequence[str]) -> int:
    if "--help" in words or "-h" in words or len(words) > 1:
        print((__doc__ or "").strip())
        return 0 if len(words) < 2 else 2
    folder = Path(words[0] if words else "results")
    ablation = read(ABLATION)
    try:
        rows = list(select(load(folder), ablation=ablation.name))
        text = page(rows, load_config(LARGE, [], CHECKS), DEGREE, list(ablation.arms))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    out = folder / "tables" / "axes.md"
    write_atomically(out, text.encode())
    console = Console()
    console.print(Markdown(text)) if console.is_terminal else print(text)
    print("wrote", out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
