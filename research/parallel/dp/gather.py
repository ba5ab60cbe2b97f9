"""Parameters that exist while they are used: gathered before a unit's forward and its backward, then freed.

A unit is a part of the model: the embedding, one decoder layer, the head, one depth of multi-token prediction. While
one computes, the weights of the next are on their way: which it is, the last pass through the same stage tells.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from research import comm
from research.ledger import Ledger
from research.models import recipes
from research.parallel.dp.shards import Sharded

ALIGNED = 64  # bytes: products want weights that start at such addresses


def units_of(model: nn.Module) -> dict[str, nn.Module]:
    """Units by full name, in the order of definition."""
    return dict(_units(model))


def _units(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, part in model.named_children():
        if isinstance(part, nn.ModuleDict):
            yield from ((f"{name}.{key}", one) for key, one in part.items())
        else:
            yield name, part


class Unit:
    """The weights of a module. Their tensors always have their shapes; the memory behind them comes and goes, so that
    whatever autograd has saved of them is right whenever they are gathered."""

    def __init__(self, module: nn.Module, buckets: Sequence[Sharded]) -> None:
        self.module, self.buckets = module, buckets
        self.gathered = False
        self.coming: list[comm.Pending] = []
        self.awaited = 0  # parameters that the backward under way has yet to reach; 0: it is not in backward
        self.parameters = [shard.parameter for bucket in buckets for shard in bucket.held.values()]
        sizes = [-(-p.nbytes // ALIGNED) * ALIGNED for p in self.parameters]
        self.memory = torch.empty(sum(sizes), dtype=torch.uint8, device=self.parameters[0].device)
        for parameter, part in zip(self.parameters, self.memory.split(sizes), strict=True):
            parameter.data = part[: parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        self.free()

    def start(self) -> None:
        if not self.gathered and not self.coming:
            self.coming = [bucket.start_gather() for bucket in self.buckets]

    def gather(self) -> None:
        self.start()
        self.memory.untyped_storage().resize_(self.memory.nbytes)
        for bucket, coming in zip(self.buckets, self.coming, strict=True):
            bucket.fill(coming)
        self.gathered, self.coming = True, []

    def free(self) -> None:
        self.gathered, self.awaited = False, 0
        self.memory.untyped_storage().resize_(0)

    def drop(self) -> None:
        for coming in self.coming:
            coming.wait()
        self.coming = []
        self.free()


class Order:
    """The order in which units were gathered the last time."""

    def __init__(self) -> None:
        self._units: list[Unit] = []
        self._at = 0

    def restart(self) -> None:
        self._at = 0

    def after(self, unit: Unit) -> Unit | None:
        """Notes that this one was gathered; the one that came next the last time."""
        if self._units[self._at : self._at + 1] != [unit]:
            self._units[self._at :] = [unit]
        self._at += 1
        return self._units[self._at] if self._at < len(self._units) else None


class Gathering:
    """Hooks that gather and free. `begin` is called before each forward and backward, `reached` with each parameter
    that autograd is done with."""

    def __init__(self, parts: Iterable[tuple[nn.Module, Sequence[Sharded]]], ledger: Ledger, keep: bool) -> None:
        self.units = [Unit(module, buckets) for module, buckets in parts if buckets]
        self._of: dict[Tensor, Unit] = {p: unit for unit in self.units for p in unit.parameters}
        self._orders: dict[tuple[int, str], Order] = {}
        self._order = Order()
        self._ledger, self._keep = ledger, keep
        for unit in self.units:
            for module in unit.module.modules():
                module.register_forward_pre_hook(partial(self._before_forward, unit))
            unit.module.register_forward_hook(partial(self._after_forward, unit))

    def begin(self, stage: int) -> None:
        """A forward or a backward starts, the one before is over."""
        self._order = self._orders.setdefault((stage, self._ledger.phase), Order())
        self._order.restart()
        self.settle()

    def settle(self) -> None:
        """Free what the last backward did not reach in full."""
        for unit in self.units:
            if unit.awaited:
                unit.free()

    def drop(self) -> None:
        """Free everything: the weights are about to change."""
        for unit in self.units:
            unit.drop()

    def reached(self, parameter: Tensor) -> None:
        """Every product with this parameter is behind: free its unit after the last one."""
        unit = self._of.get(parameter)
        if unit is not None and unit.awaited:
            unit.awaited -= 1
            if not unit.awaited:
                unit.free()

    def _gather(self, unit: Unit) -> None:
        if not unit.gathered:
            unit.gather()
            if following := self._order.after(unit):
                following.start()

    def _before_forward(self, unit: Unit, module: nn.Module, args: tuple[object, ...]) -> None:
        for one in self._used(unit, args):
            self._gather(one)

    def _used(self, unit: Unit, args: tuple[object, ...]) -> list[Unit]:
        """A unit, and those whose weights a module of it is given: a tied head gets the embedding's."""
        return [unit, *(self._of[a] for a in args if isinstance(a, nn.Parameter) and a in self._of)]

    def _after_forward(self, unit: Unit, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        if unit.awaited:
            return  # recompute, inside its backward
        units = self._used(unit, args)
        outputs = output if isinstance(output, tuple) else (output,)
        gradients = [t for t in outputs if isinstance(t, Tensor) and t.requires_grad]
        for t in gradients:
            recipes.keep(t)  # another unit's backward may want it, when this one's weights are freed
            t.register_hook(lambda _: self._before_backward(units))
        if not (gradients and self._keep):
            for one in units:
                one.free()

    def _before_backward(self, units: Sequence[Unit]) -> None:
        for unit in units:
            unit.awaited = unit.awaited or len(unit.parameters)
            self._gather(unit)
