"""The benches by name. Each is a function that yields its cases; it imports what it compares with when it is called."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping

from research.bench.side_by_side import Case, RankedCase


class MissingPeerError(ValueError):
    """A bench compares with a package that is not installed."""


def layer() -> Iterator[Case]:
    """Forward and backward of one decoder layer, dense and MoE, against transformers'."""
    needs("transformers")
    from research.bench.layer import cases

    return cases()


def tensor() -> Iterator[RankedCase]:
    """Training steps at tp=2 against torch's parallelize_module with loss parallelism, on two processes."""
    from research.bench.tensor import cases

    return cases()


# Those that fork ranks come first: before any threaded kernel has run in this process.
BENCHES: Mapping[str, Callable[[], Iterator[Case | RankedCase]]] = {"tensor": tensor, "layer": layer}


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingPeerError(f"this bench compares with {package}, which is not installed: pip install '.[test]'")
