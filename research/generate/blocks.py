"""Blocks of a key-value cache: which are free, and which hold the tokens of which sequence (Kwon et al. 2023, section
4.2 and 4.3)."""

from collections.abc import Iterable


class Blocks:
    """The blocks of all layers that see equally far back: a block has the same number in each of them.

    `count` blocks of `size` tokens. A layer with a `window` gives a block back once no later token sees any of it, so
    that the table of a sequence begins at `first` of its tokens.
    """

    def __init__(self, count: int, size: int, window: int = 0) -> None:
        self.count, self.size, self.window = count, size, window
        self.free = list(reversed(range(count)))
        self.tables: dict[int, list[int]] = {}
        self.first: dict[int, int] = {}  # a multiple of `size`
        self._reserved: dict[int, int] = {}

    def reserve(self, sequence: int, tokens: int) -> bool:
        """Promise what the sequence needs to grow to so many tokens; False where that is not left."""
        need = blocks_needed(tokens, self.size, self.window)
        if sum(self._reserved.values()) + need > self.count:
            return False
        self._reserved[sequence], self.tables[sequence], self.first[sequence] = need, [], 0
        return True

    def extend(self, sequence: int, length: int) -> None:
        """Hold those of the first `length` tokens that the last of them sees."""
        table = self.tables[sequence]
        unseen = max(length - self.window, 0) // self.size * self.size if self.window else 0
        while self.first[sequence] < unseen:
            self.first[sequence] += self.size
            if table:
                self.free.append(table.pop(0))
        while self.first[sequence] + len(table) * self.size < length:
            table.append(self.free.pop())

    def slots(self, sequence: int, positions: Iterable[int]) -> list[int]:
        """Where in the pools these tokens of a sequence lie: block times `size` plus the place in it."""
        table, first = self.tables[sequence], self.first[sequence]
        return [table[(p - first) // self.size] * self.size + p % self.size for p in positions]

    def release(self, sequence: int) -> None:
        """The sequence has ended."""
        self.free += reversed(self.tables.pop(sequence))
        del self.first[sequence], self._reserved[sequence]


def blocks_needed(tokens: int, size: int, window: int) -> int:
    """The most blocks that a sequence holds at once while it grows to so many tokens, one by one after its prompt."""
    whole = -(-tokens // size)
    return min(whole, -(-(window - 1) // size) + 1) if window else whole
