"""What a model is given: B samples of S tokens, already shifted."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

NOT_COUNTED = -100  # the target of a position that the loss leaves out


@dataclass(frozen=True)
class Ahead:
    """What depth k of multi-token prediction is given beside the batch: two int64 tensors of shape (B, S)."""

    tokens: Tensor  # the id that stands k places after each input; 0 past the end of the sample
    targets: Tensor  # the id that follows that one, or NOT_COUNTED


@dataclass(frozen=True)
class Batch:
    """Int64 tensors of shape (B, S) that are always cut together. Everything is shifted before anything is cut, so
    that who cuts need not know of shifts."""

    tokens: Tensor  # input ids
    targets: Tensor  # the id that follows each input, or NOT_COUNTED
    positions: Tensor  # of each token in its whole sample, from 0, whatever documents it holds
    documents: Tensor  # tokens of one sample with the same number are of one document
    numbers: Tensor | None = None  # of each token in its global microbatch, once that is whole no more
    whole_tokens: int = 0  # of the global microbatch
    starts: Tensor | None = None  # (B, S) of whole samples, on the host: where each token's document begins; once cut
    ahead: tuple[Ahead, ...] = ()  # of each depth of multi-token prediction, depth 1 first

    def map(self, f: Callable[[Tensor], Tensor]) -> "Batch":
        """The batch with `f` applied to every tensor of its tokens."""
        numbers = None if self.numbers is None else f(self.numbers)
        cut = (f(self.tokens), f(self.targets), f(self.positions), f(self.documents))
        ahead = tuple(Ahead(f(a.tokens), f(a.targets)) for a in self.ahead)
        return Batch(*cut, numbers, self.whole_tokens, self.starts, ahead)

    def part(self, number: int, of: int) -> "Batch":
        """One of so many parts of its samples; where they cannot be equal, the first ones have one sample more."""
        return self.map(lambda t: t.tensor_split(of)[number])

    def numbered(self) -> "Batch":
        """A global microbatch that may now be cut: its tokens carry their numbers, row by row."""
        numbers = torch.arange(self.tokens.numel()).view_as(self.tokens)
        return dataclasses.replace(self, numbers=numbers, whole_tokens=self.tokens.numel())
