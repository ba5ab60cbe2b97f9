"""A page of a comparison as a LaTeX table, to be read with `\\input`."""

import re
from collections.abc import Sequence

from research.report.tables import Page

SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "–": "--",
} | {c: f"\\{c}" for c in "&%$#_{}"}
PLAIN = re.compile("|".join(map(re.escape, SPECIAL)))


def latex(page: Page) -> str:
    """Needs the packages booktabs (rules) and graphicx (as wide as the text)."""
    names, count = list(page.columns), page.text_columns
    body = zip(*page.columns.values(), strict=True)
    return "\n".join(
        [
            r"% \usepackage{booktabs,graphicx}",
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{escaped(page.title)}. {escaped(' '.join(page.facts))}}}",
            rf"\label{{tab:{re.sub(r'[^A-Za-z0-9]+', '-', page.title)}}}",
            r"\resizebox{\linewidth}{!}{%",
            rf"\begin{{tabular}}{{{'l' * count}{'r' * (len(names) - count)}}}",
            r"\toprule",
            _line(names),
            r"\midrule",
            *map(_line, body),
            r"\bottomrule",
            r"\end{tabular}}",
            r"\begin{flushleft}",
            r"\footnotesize",
            *(rf"{escaped(note)}\par" for note in [*page.footnotes, *page.notes]),
            r"\end{flushleft}",
            r"\end{table}",
            "",
        ]
    )


def _line(cells: Sequence[str]) -> str:
    return " & ".join(_cell(c) for c in cells) + r" \\"


def _cell(text: str) -> str:
    """A line break followed by `[` would be read as a length: such text is put in braces by `escaped`."""
    bold = re.fullmatch(r"\*\*(.*)\*\*", text)
    return rf"\textbf{{{escaped(bold[1])}}}" if bold else escaped(text)


def escaped(text: str) -> str:
    """Text as it is, whatever it holds."""
    return PLAIN.sub(lambda found: SPECIAL[found[0]], text).replace("[", "{[}").replace("]", "{]}")
