"""Unsharded storage: every rank keeps its whole box of each parameter, its gradient and its optimizer state.

Gradients of all microbatches add up in flat buckets of float32 (float64 in a float64 run). In the last backward a
bucket is summed over its replicas as soon as it is complete, beside the rest of the backward.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from research import comm
from research.build import DTYPES, Built
from research.config import TrainConfig
from research.mesh import Box, Group
from research.train.optim import adamw, make_moments


@dataclass
class Bucket:
    """Parameters whose gradients travel together: one flat buffer, one group."""

    group: Group
    names: list[str]
    flat: Tensor
    missing: int = 0  # parameters whose gradient the last backward has not reached yet
    pending: comm.Pending | None = None


@dataclass
class Held:
    """One parameter on this rank. `master` is what the optimizer steps; it is `used` itself where dtypes agree."""

    name: str
    used: nn.Parameter
    master: Tensor
    grad: Tensor  # a view of its bucket
    bucket: Bucket = field(repr=False)


class Storage:
    def __init__(self, built: Built, config: TrainConfig, device: torch.device) -> None:
        self.built, self.config, self.device = built, config, device
        self.grad_dtype = torch.float64 if config.dtype == "float64" else torch.float32
        self.buckets: list[Bucket] = []
        self.held: dict[str, Held] = {}
        self._last = False
        self._started = 0  # buckets whose sum is under way
        self._fill_buckets()
        self.optimizer = adamw(config, [(h.master, built.specs[h.name].decays) for h in self.held.values()])

    def _fill_buckets(self) -> None:
        """In reverse order of definition, as backward meets them. The order is the same on every rank."""
        parameters = {n: p for n, p in self.built.model.named_parameters() if p.requires_grad}
        limit = self.config.bucket_mib * 2**20
        plans: dict[tuple[int, ...], list[list[str]]] = {}
        sizes: dict[tuple[int, ...], float] = {}
        ordered: list[list[str]] = []
        for name in reversed(parameters):
            ranks = self.built.replicas[name].ranks
            nbytes = parameters[name].numel() * self.grad_dtype.itemsize
            if ranks not in plans or sizes[ranks] + nbytes > limit:
                plans.setdefault(ranks, []).append([])
                ordered.append(plans[ranks][-1])
                sizes[ranks] = 0
            plans[ranks][-1].append(name)
            sizes[ranks] += nbytes
        for names in ordered:
            total = sum(parameters[n].numel() for n in names)
            flat = torch.zeros(total, dtype=self.grad_dtype, device=self.device)
            bucket = Bucket(self.built.replicas[names[0]], names, flat)
            self.buckets.append(bucket)
            views = flat.split([parameters[n].numel() for n in names])
            for name, view in zip(names, views, strict=True):
                self._hold(name, parameters[name], view.view_as(parameters[name]), bucket)

    def _hold(self, name: str, used: nn.Parameter, grad: Tensor, bucket: Bucket) -> None:
        master = used.detach()
        dtype = DTYPES[self.config.dtype]
        if used.dtype != dtype and not self.built.specs[name].keep_float32:
            used.data = master.to(dtype)
        held = Held(name, used, master, grad, bucket)
        self.held[name] = held
        used.register_post_accumulate_grad_hook(lambda p: self._accumulate(held))

    def begin_backward(self, last: bool) -> None:
        """Called before each microbatch's backward; `last` ones are followed by the reduction."""
        self._last = last
        if last:
            for bucket in self.buckets:
                bucket.missing = len(bucket.names)

    def _accumulate(self, held: Held) -> None:
        """A gradient has arrived: add it up in the gradient's dtype, and start its bucket if it was the last one."""
        assert held.used.grad is not None
        held.grad.add_(held.used.grad)
        held.used.grad = None
        if self._last:
            held.bucket.missing -= 1
            self._start_complete()

    def _start_complete(self, force: bool = False) -> None:
        """Start buckets in their own order, whichever completes first: ranks must issue the same sequence."""
        while self._started < len(self.buckets) and (force or not self.buckets[self._started].missing):
            bucket = self.buckets[self._started]
            bucket.pending = comm.start_all_reduce(bucket.flat, bucket.group, "gradients")
            self._started += 1

    def finish_backward(self) -> None:
        """Wait until every gradient is the sum over its replicas; those that no backward reached travel as zeros."""
        self._start_complete(force=True)
        for bucket in self.buckets:
            assert bucket.pending is not None
            bucket.pending.wait()
            bucket.pending = None
        self._started = 0

    def gradients(self) -> Iterator[tuple[str, Box, Tensor]]:
        """Full name, box and local gradient of each parameter, after the reduction and before clipping."""
        return ((n, self.built.layouts[n].box(self.built.mesh.at), h.grad) for n, h in self.held.items())

    def weights(self) -> Iterator[tuple[str, Box, Tensor]]:
        """Full name, box and local master weight of each parameter, those without a gradient last."""
        masters = {n: h.master for n, h in self.held.items()} | self._untrained()
        return ((n, self.built.layouts[n].box(self.built.mesh.at), master) for n, master in masters.items())

    def _untrained(self) -> dict[str, Tensor]:
        """Parameters that have no gradient: used as they are, never cast."""
        return {n: p.detach() for n, p in self.built.model.named_parameters() if not p.requires_grad}

    def norm(self) -> Tensor:
        """Global gradient norm: each box counts on the first rank that holds it."""
        square = torch.zeros((), dtype=self.grad_dtype, device=self.device)
        for bucket in self.buckets:
            if bucket.group.rank == 0:
                square += bucket.flat.square().sum()
        return comm.all_reduce_(square, self.built.mesh.group("world"), "gradient norm").sqrt()

    def step(self, lr: float, norm: Tensor, good: Tensor) -> None:
        """Clip, step where `good` (decided on the device, so that the host need not wait), and clear gradients."""
        if self.config.clip > 0:
            scale = (self.config.clip / norm).clamp(max=1.0)
            for bucket in self.buckets:
                bucket.flat.mul_(scale)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for held in self.held.values():
            held.master.grad = held.grad
        # The fused kernel skips on the device where this is not 0: what torch's GradScaler relies on.
        self.optimizer.found_inf = (~good).float()  # type: ignore[attr-defined]
        self.optimizer.step()
        self.publish()
        for bucket in self.buckets:
            bucket.flat.zero_()

    def publish(self) -> None:
        """Masters have changed: what forward uses follows them."""
        for held in self.held.values():
            if held.used.dtype != held.master.dtype:
                held.used.data.copy_(held.master)

    def moments(self, name: str) -> dict[str, Tensor]:
        """What the optimizer knows of a parameter: tensors that lie like its master, and scalars. Nothing is known of
        those without a gradient."""
        make_moments(self.optimizer)
        known: dict[str, Tensor] = self.optimizer.state[self.held[name].master] if name in self.held else {}
        return known

    def copies(self, name: str) -> Group:
        """The ranks that hold the same box of this parameter's weight and moments."""
        return self.built.replicas[name]

    def tensors(self) -> dict[str, list[Tensor]]:
        """All of this rank's training state, by category of the memory meter."""
        moments = (t for state in self.optimizer.state.values() for t in state.values())
        return {
            "parameters": [*(h.used for h in self.held.values()), *self._untrained().values()],
            "master": [h.master for h in self.held.values() if h.used.data_ptr() != h.master.data_ptr()],
            "gradients": [b.flat for b in self.buckets],
            "optimizer": [t for t in moments if isinstance(t, Tensor)],
        }
