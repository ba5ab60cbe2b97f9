"""The benches by name. Each is a function that yields its cases; it imports what it compares with when it is called."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping

from research.bench.side_by_side import Case


class MissingPeerError(ValueError):
    """A bench compares with a package that is not installed."""


def layer() -> Iterator[Case]:
    """Forward and backward of one decoder layer, dense and MoE, against transformers'."""
    needs("transformers")
    from research.bench.layer import cases

    return cases()


BENCHES: Mapping[str, Callable[[], Iterator[Case]]] = {"layer": layer}


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingPeerError(f"this bench compares with {package}, which is not installed: pip install '.[test]'")
