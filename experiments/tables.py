"""Tables and figures of a results folder: `python -m experiments.tables [FOLDER] [--ablation NAME]`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console
from rich.markdown import Markdown

from research.report.publish import by_ablation, write_tables

ABLATIONS = Path(__file__).parent / "ablations"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.tables", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("results"), help="holds rows/ (default: results)")
    parser.add_argument("--ablation", metavar="NAME", help='only this one; "runs" are rows outside any ablation')
    args = parser.parse_args(words)
    try:
        groups = by_ablation(args.folder)
    except ValueError as error:
        return _fail(str(error))
    if not groups:
        return _fail(f"no rows in {args.folder / 'rows'}: `python -m experiments.run CONFIG` writes one")
    if args.ablation is not None and args.ablation not in groups:
        return _fail(f"no rows of ablation {args.ablation} in {args.folder / 'rows'}; there are: {', '.join(groups)}")
    console = Console()
    for ablation in [args.ablation] if args.ablation else groups:
        page, *others = write_tables(args.folder, ablation, groups[ablation], arms(ablation))
        text = page.read_text(encoding="utf-8")
        if console.is_terminal:
            console.print(Markdown(text))
        else:
            print(text)
        print("wrote", *(str(path) for path in (page, *others)))
    return 0


def arms(ablation: str) -> list[str] | None:
    """Arms of the ablation in the order of its file; None where it has no file."""
    path = ABLATIONS / f"{ablation}.yaml"
    return [str(arm) for arm in OmegaConf.select(OmegaConf.load(path), "arms")] if path.exists() else None


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
