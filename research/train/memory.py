"""Exact peak memory of a step, by what the bytes are for."""

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from research.ledger import Ledger
from research.models.batch import Batch
from research.train.loop import Trainer


class MemoryMeter(TorchDispatchMode):
    """Counts the bytes of every storage from its first use to its release, on any device; allocators may round up.

    `known` holds what exists before, by category. What is made under the meter belongs to the category that the ledger
    names at that moment: activations, or communication buffers.
    """

    def __init__(self, known: Mapping[str, Iterable[Tensor]], ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], str, int]] = {}  # with category and bytes
        self._live: Counter[str] = Counter()
        self.peak: dict[str, int] = {}  # by category, in the fullest moment
        for category, tensors in known.items():
            for tensor in tensors:
                self._see(tensor, category)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf, self._ledger.allocates)
        return out

    def _see(self, tensor: Tensor, category: str) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._alive:
            grown = self._resize(key, nbytes)
        elif grown := nbytes > 0:

            def released(_: object) -> None:
                self._resize(key, 0)
                del self._alive[key]

            self._alive[key] = weakref.ref(storage, released), category, nbytes
            self._live[category] += nbytes
        if grown and self._live.total() > sum(self.peak.values()):
            self._look_again()
            if self._live.total() > sum(self.peak.values()):
                self.peak = dict(self._live)

    def _resize(self, key: int, nbytes: int) -> bool:
        """Whether it has grown."""
        reference, category, before = self._alive[key]
        self._live[category] += nbytes - before
        self._alive[key] = reference, category, nbytes
        return nbytes > before

    def _look_again(self) -> None:
        """Buffers may have shrunk since they were seen: no operation tells."""
        for key, (reference, category, _) in list(self._alive.items()):
            if category == "communication" and (storage := reference()) is not None:
                self._resize(key, storage.nbytes())


CATEGORIES = ("parameters", "master", "gradients", "optimizer", "activations", "communication")


def peak_bytes(trainer: Trainer, microbatches: Sequence[Batch]) -> dict[str, int]:
    """Peak of one whole step on this rank, by category; 0 where there is none.

    The step is one more after those that were timed, and its optimizer is told that it was not finite: everything
    runs, no weight moves. Every rank must call it.
    """
    with MemoryMeter(trainer.storage.tensors(), trainer.mesh.ledger) as meter:
        totals = trainer.backward(microbatches).totals
        trainer.storage.step(0.0, trainer.storage.norm(), torch.zeros_like(totals, dtype=torch.bool).all())
    return {c: meter.peak.get(c, 0) for c in CATEGORIES}
