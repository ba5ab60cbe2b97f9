"""Full recompute: keep only a layer's inputs, run the layer again in backward."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from torch import Tensor
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")


class Keep(Protocol):
    """Makes a decision, or repeats the one that was made before."""

    def __call__(self, compute: Callable[[], T]) -> T: ...


Layer = Callable[..., tuple[Tensor, Tensor]]  # keep, inputs -> output, auxiliary loss


def decide(compute: Callable[[], T]) -> T:
    """Without recompute a decision is simply made."""
    return compute()


class _Kept:
    """Decisions of the first run, replayed in order by the second: a tie that fell the other way would change shapes,
    and a collective must not run twice."""

    def __init__(self) -> None:
        self.values: list[object] = []
        self.next = 0

    def __call__(self, compute: Callable[[], T]) -> T:
        if self.next == len(self.values):
            self.values.append(compute())
        self.next += 1
        return self.values[self.next - 1]  # type: ignore[return-value]


def recomputed(layer: Layer, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """`layer(keep, *inputs)`, whose activations are dropped now and computed again in backward. The layer makes every
    discrete decision, and every count that other ranks take part in, as `keep(lambda: ...)`."""
    kept = _Kept()

    def run(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        kept.next = 0
        return layer(kept, *inputs)

    out: tuple[Tensor, Tensor] = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
    return out
