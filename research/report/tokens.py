"""Which rank holds which tokens of a sample under context parallelism, and which of its queries meet whose keys."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from research.parallel.cp.plan import Balance, held, make_plan, positions
from research.report.figures import COLOURS

BALANCES: tuple[Balance, ...] = ("none", "zigzag", "striped")
PALE = 0.35  # strength of a meeting with keys that travel


def holders(balance: Balance, sequence: int, ranks: int) -> np.ndarray:
    """(S,): the rank of each position."""
    found = np.empty(sequence, int)
    for rank in range(ranks):
        found[positions(held(balance, sequence, ranks, rank))] = rank
    return found


def work(sequence: int, ranks: int, balances: Sequence[Balance] = BALANCES, window: int = 0) -> pd.DataFrame:
    """A line for each balance and rank: pairs of a query and a key that it works on for a sample, that over the mean of
    the ranks, and for how many tokens keys and values come to it by a ring, and gradients of them."""
    plans = {(b, r): make_plan(ranks, r, b, sequence, window) for b in balances for r in range(ranks)}
    lines = {place: (p.pairs, p.received(), p.returned()) for place, p in plans.items()}
    index = pd.MultiIndex.from_tuples(lines, names=["balance", "rank"])
    table = pd.DataFrame(list(lines.values()), index=index, columns=["pairs", "keys come", "gradients come"])
    table.insert(1, "over the mean", table.pairs / table.groupby("balance").pairs.transform("mean"))
    return table


def square(sequence: int, ranks: int, balances: Sequence[Balance] = BALANCES, window: int = 0) -> Figure:
    """Queries by keys, a panel for each balance: the colour is the rank of the query, strong where the key is its own,
    pale where it has to come; white is never computed."""
    figure = Figure(figsize=(3.4 * len(balances), 3.7), layout="constrained")
    places = np.arange(sequence)
    seen = places[:, None] >= places
    if window:
        seen &= places[:, None] - places < window
    for balance, axes in zip(balances, figure.subplots(1, len(balances), squeeze=False)[0], strict=True):
        rank = holders(balance, sequence, ranks)
        colours = np.array([to_rgb(COLOURS[r % len(COLOURS)]) for r in rank])
        strength = np.where(rank[:, None] == rank, 1.0, PALE)[..., None] * seen[..., None]
        axes.imshow(1 - strength * (1 - colours[:, None]))
        axes.set(title=balance, xlabel="key", ylabel="query", xticks=[0, sequence - 1], yticks=[0, sequence - 1])
    return figure
