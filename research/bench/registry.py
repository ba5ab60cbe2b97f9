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


def ddp() -> Iterator[RankedCase]:
    """Training steps of data parallelism against torch's DistributedDataParallel, on 2 and 4 processes."""
    from research.bench.data import cases

    return cases(0, "DistributedDataParallel")


def fsdp() -> Iterator[RankedCase]:
    """Training steps of ZeRO's stage 3 against torch's fully_shard, on 2 and 4 processes."""
    from research.bench.data import cases

    return cases(3, "fully_shard")


def context() -> Iterator[RankedCase]:
    """Training steps at cp=2, ring and zigzag, against torch's own ring attention and against one process."""
    from research.bench.context import cases

    return cases()


def stages() -> Iterator[RankedCase]:
    """Training steps at pp=2 against torch.distributed.pipelining, with tp=2 too; split backwards against 1F1B."""
    from research.bench.stages import cases

    return cases()


def experts() -> Iterator[RankedCase]:
    """Training steps at ep=2 against all_to_all_single and a loop over experts, on two processes."""
    from research.bench.expert import cases

    return cases()


# Those that fork ranks come first: before any threaded kernel has run in this process.
BENCHES: Mapping[str, Callable[[], Iterator[Case | RankedCase]]] = {
    "ddp": ddp,
    "fsdp": fsdp,
    "tensor": tensor,
    "context": context,
    "experts": experts,
    "stages": stages,
    "layer": layer,
}


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingPeerError(f"this bench compares with {package}, which is not installed: pip install '.[test]'")
