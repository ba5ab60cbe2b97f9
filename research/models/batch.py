"""What a model is given: B samples of S tokens, already shifted."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

NOT_COUNTED = -100  # the target of a position that the loss leaves out


@dataclass(frozen=True)
class Batch:
    """Four int64 tensors of shape (B, S) that are always cut together."""

    tokens: Tensor  # input ids
    targets: Tensor  # the id that follows each input, or NOT_COUNTED
    positions: Tensor  # of each token in its whole sample, from 0, whatever documents it holds
    documents: Tensor  # tokens of one sample with the same number are of one document

    def map(self, f: Callable[[Tensor], Tensor]) -> "Batch":
        """The batch with `f` applied to every tensor."""
        return Batch(f(self.tokens), f(self.targets), f(self.positions), f(self.documents))
