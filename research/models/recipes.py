"""Selective recompute: an activation that is cheap to make again, from what is kept anyway, is kept as a recipe.

A function of pointwise.py whose output can be made again without a product or a collective sets `ctx.again`: a function
of its context, which makes the output from what the function keeps for its own backward. Where `selective` is on,
whoever would save such an output (a product, as its input) saves the recipe instead, and makes it again when its own
backward comes, which is before that of the function. So nothing is kept for a recipe's sake.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@dataclass
class Recipe:
    """How to make a tensor again, which may be a view of an output. Several may want one output: it is made once for
    all of them, and dropped with the last."""

    context: Any  # of the autograd function; its attributes `wanted` and `made` belong to its recipes
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def __call__(self) -> Tensor:
        context = self.context
        if context.made is None:
            context.made = context.again(context)
        whole: Tensor = context.made
        context.wanted -= 1
        if context.wanted <= 0:  # less where one saved tensor is asked for twice
            context.made = None
        return whole.as_strided(self.size, self.stride, self.offset)


def recipe_of(x: Tensor) -> Recipe | None:
    """None where x is no output of a function that can make it again, nor a view of one."""
    context = _context(x)
    if getattr(context, "again", None) is None or getattr(context, "stays", False):
        return None
    if not hasattr(context, "wanted"):
        context.wanted, context.made = 0, None
    context.wanted += 1
    return Recipe(context, tuple(x.shape), x.stride(), int(x.storage_offset()))


def keep(x: Tensor) -> None:
    """Whoever saves x from now on saves it as it is: what would make it again may be gone by then."""
    context = _context(x)
    if getattr(context, "again", None) is not None:
        context.stays = True


def _context(x: Tensor) -> Any:
    """Of the function that has made x, or what x is a view of."""
    return (x if x._base is None else x._base).grad_fn


def selective() -> saved_tensors_hooks:
    """A context within which cheap activations are saved as recipes."""
    return saved_tensors_hooks(lambda x: recipe_of(x) or x, lambda kept: kept() if isinstance(kept, Recipe) else kept)
