"""Unsharded storage: every rank keeps its whole box of each parameter, its gradient and its optimizer state.

Gradients of all microbatches add up in flat buckets. In the last backward of a stage a bucket is summed over its
replicas as soon as it is complete, beside the rest of the backward.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from research import comm
from research.built import Built
from research.config import TrainConfig
from research.mesh import Box, Group
from research.train.optim import adamw, make_moments

ROW = 1024  # elements whose norm is taken at once


def square_sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of squares of x (N,). By rows, as one norm of millions of float32 elements is off by up to a part in a
    thousand on a CPU."""
    rows = len(x) // ROW * ROW
    norms = torch.linalg.vector_norm(x[:rows].view(-1, ROW), dim=1, dtype=dtype)
    return norms.square().sum() + torch.linalg.vector_norm(x[rows:], dtype=dtype).square()


@dataclass
class Held:
    """One parameter on this rank. `master` is what the optimizer steps; it is `parameter` itself where dtypes agree."""

    name: str
    parameter: nn.Parameter  # what forward uses
    master: Tensor
    grad: Tensor  # a view of its bucket


@dataclass
class Bucket:
    """Parameters of one stage whose gradients travel together: one flat buffer, one group."""

    group: Group
    stage: int
    held: Mapping[str, Held]  # by full name
    flat: Tensor  # the gradients that the optimizer reads
    missing: int = field(default=0, init=False)  # parameters whose gradient a backward has not reached yet
    reduced: int = field(default=0, init=False)  # reductions of this step that have been started
    pending: comm.Pending | None = field(default=None, init=False, repr=False)
    stale: set[str] = field(default_factory=set, init=False)  # whose place still holds what was there before

    def add(self, name: str, grad: Tensor) -> None:
        """Add a microbatch's gradient. The first one overwrites: cheaper than to clear, then to add."""
        place = self._place(name)
        if name in self.stale:
            self.stale.remove(name)
            place.copy_(grad)
        else:
            place.add_(grad)

    def _place(self, name: str) -> Tensor:
        """Where this rank adds up a gradient."""
        return self.held[name].grad

    def _complete(self) -> None:
        """What was not reached is zero."""
        for name in self.stale:
            self._place(name).zero_()
        self.stale.clear()

    def reduce(self, last: bool) -> None:
        """Start the sum over ranks; `last`: no other one follows in this step."""
        self._complete()
        self.pending = comm.start_all_reduce(self.flat, self.group, "gradients")

    def finish(self) -> None:
        """Wait until `flat` is the sum."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None

    def clear(self) -> None:
        self.stale = set(self.held)


class Storage:
    """What the executor tells a storage: `begin_forward` and `begin_backward` before each microbatch on a stage;
    `accumulate` with each gradient that was put off to W; `end_backward` once all gradients of a microbatch on a stage
    are in (after BW, or W), and `finish_backward` at the end of the step. Other gradients arrive by themselves.

    Ranks must issue the same sequence of collectives, so the buckets of a stage start in their own order, whichever
    completes first. At `end_backward` those that were not reached travel as they are. What several stages of a rank
    share (`SHARED`) travels at the end of the step: no backward of one of them knows that it is the last.
    """

    buckets: Sequence[Bucket]
    held: Mapping[str, Held]  # by full name

    def __init__(
        self,
        built: Built,
        config: TrainConfig,
        device: torch.device,
        grad_dtype: torch.dtype | None = None,
        reduce_each_microbatch: bool = False,
    ) -> None:
        """`grad_dtype`: of sums of gradients; None: as of masters. `reduce_each_microbatch`: not once a step."""
        self.built, self.config, self.device = built, config, device
        self._reduce_each_microbatch = reduce_each_microbatch
        self.dtype = torch.float64 if config.dtype == "float64" else torch.float32  # of masters, moments, losses
        self.grad_dtype = grad_dtype or self.dtype
        self._parameters = {n: p for n, p in built.model.named_parameters() if p.requires_grad}
        self.buckets = [self._bucket(names) for names in self._plan()]
        self.held = {name: held for bucket in self.buckets for name, held in bucket.held.items()}
        self._bucket_of: dict[Tensor, tuple[str, Bucket]] = {
            held.parameter: (name, bucket) for bucket in self.buckets for name, held in bucket.held.items()
        }
        self._buckets_on = {s: [b for b in self.buckets if b.stage == s] for s in {b.stage for b in self.buckets}}
        self._reductions_due = Counter(dict.fromkeys(self._buckets_on, 0))  # by stage, so far in this step
        self._completing_stage: int | None = None  # the stage whose buckets are completed by what now arrives
        self._last_backward = False  # whether the backward under way is the last one on its stage
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
        self.optimizer = adamw(config, [(h.master, built.specs[n].decays) for n, h in self.held.items()])

    def _plan(self) -> list[list[str]]:
        """Names by bucket, in reverse order of definition, as backward meets them: the same on every rank."""
        filling: dict[Hashable, list[str]] = {}
        sizes: dict[Hashable, float] = {}
        planned: list[list[str]] = []
        for name in reversed(self._parameters):
            key, nbytes = self._bucket_key(name), self._parameters[name].numel() * self.grad_dtype.itemsize
            if key not in filling or sizes[key] + nbytes > self._bucket_limit_bytes():
                planned.append([])
                filling[key], sizes[key] = planned[-1], 0
            filling[key].append(name)
            sizes[key] += nbytes
        return planned

    def _bucket_limit_bytes(self) -> float:
        """Bytes of gradients in one bucket, at most."""
        return self.config.bucket_mib * 2**20

    def _bucket_key(self, name: str) -> Hashable:
        """Parameters may share a bucket where this is the same."""
        return self._stage(name), self.built.replicas[name].ranks, self.built.copies.get(name)

    def _stage(self, name: str) -> int:
        return self.built.stages.get(name, 0)

    def _bucket(self, names: Sequence[str]) -> Bucket:
        sizes = [self._parameters[n].numel() for n in names]
        flat = torch.zeros(sum(sizes), dtype=self.grad_dtype, device=self.device)
        held = {}
        for name, view in zip(names, flat.split(sizes), strict=True):
            parameter = self._parameters[name]
            master = parameter.detach()
            self._cast(name)
            held[name] = Held(name, parameter, master, view.view_as(parameter))
        return Bucket(self.built.replicas[names[0]], self._stage(names[0]), held, flat)

    def _cast(self, name: str) -> None:
        """Make a parameter what forward uses."""
        parameter = self._parameters[name]
        if parameter.dtype != (dtype := self._used_dtype(name)):
            parameter.data = parameter.detach().to(dtype)

    def _used_dtype(self, name: str) -> torch.dtype:
        return self.dtype if self.built.specs[name].keep_float32 else self.built.dtype

    def begin_forward(self, stage: int) -> None:
        """Before the forward of a microbatch on a stage: all weights are here."""

    def begin_backward(self, stage: int, last: bool) -> None:
        """Before a backward (BW or B) of a microbatch on a stage; `last`: no other gradient follows on it."""
        whole = (last or self._reduce_each_microbatch) and not self.built.seams.products.puts_off
        self._completing_stage, self._last_backward = stage if whole else None, last
        for bucket in self._buckets_on.get(stage, ()):
            bucket.missing = len(bucket.held)

    def accumulate(self, parameter: Tensor, grad: Tensor) -> None:
        """Add a gradient that was put off to W."""
        name, bucket = self._bucket_of[parameter]
        bucket.add(name, grad)

    def end_backward(self, stage: int, last: bool) -> None:
        """All gradients of a microbatch on a stage are in."""
        self._completing_stage, self._last_backward = None, last
        if last or self._reduce_each_microbatch:
            self._reductions_due[stage] += 1
            self._start_reductions(stage, force=True)

    def finish_backward(self) -> None:
        """Wait until every gradient is the sum over its replicas."""
        for stage, due in self._reductions_due.items():
            if not due:  # no backward came by
                self.end_backward(stage, last=True)
        for bucket in self.buckets:
            bucket.finish()
            bucket.reduced = 0
        self._sum_copies()
        self._reductions_due = Counter(dict.fromkeys(self._buckets_on, 0))

    def _on_gradient(self, parameter: Tensor) -> None:
        """Autograd has reached a parameter. Its gradient may have been put off."""
        grad, parameter.grad = parameter.grad, None
        if grad is None:
            return
        name, bucket = self._bucket_of[parameter]
        bucket.add(name, grad)
        if self._completing_stage == bucket.stage:  # a tied embedding may be used on another one, too
            bucket.missing -= 1
            self._start_reductions(bucket.stage)

    def _start_reductions(self, stage: int, force: bool = False) -> None:
        """Start the reductions of a stage in their order: of complete buckets, or all that are due."""
        for bucket in self._buckets_on.get(stage, ()):
            if bucket.reduced == self._reductions_due[stage] + (not force):
                continue
            if bucket.missing and not force:
                return
            self._reduce(bucket)
            bucket.reduced += 1

    def _reduce(self, bucket: Bucket) -> None:
        bucket.reduce(self._last_backward)

    def _sum_copies(self) -> None:
        """Between the stages that hold the same parameters; all of them hold what they share in the same order."""
        shared = [(b.flat, c) for b in self.buckets if (c := self.built.copies.get(next(iter(b.held))))]
        for pending in [comm.start_all_reduce(flat, copies, "copies") for flat, copies in shared]:
            pending.wait()

    def gradients(self) -> Iterator[tuple[str, Box, Tensor]]:
        """Full name, box and local gradient of each parameter, after the reduction and before clipping."""
        return ((name, self._box(name), held.grad) for name, held in self.held.items())

    def weights(self) -> Iterator[tuple[str, Box, Tensor]]:
        """Full name, box and local master weight of each parameter, those without a gradient last."""
        masters = {n: h.master for n, h in self.held.items()} | self._untrained()
        return ((name, self._box(name), master) for name, master in masters.items())

    def _box(self, name: str) -> Box:
        """What this rank holds of a parameter's master, moments and gradient."""
        return self.built.layouts[name].box(self.built.mesh.at)

    def _untrained(self) -> dict[str, Tensor]:
        """Parameters that have no gradient: used as they are, never cast."""
        return {n: p.detach() for n, p in self.built.model.named_parameters() if not p.requires_grad}

    def norm(self) -> Tensor:
        """Global gradient norm: each box counts on the first rank that holds it."""
        square = torch.zeros((), dtype=self.dtype, device=self.device)
        for bucket in self.buckets:
            if bucket.group.rank == 0 and self.built.first_holds(next(iter(bucket.held))):
                square += square_sum(bucket.flat, self.dtype)
        return comm.all_reduce_(square, self.built.mesh.group("world"), "gradient norm").sqrt()

    def step(self, lr: float, norm: Tensor, good: Tensor) -> None:
        """Clip, step where `good` (decided on the device, so that the host need not wait), and clear gradients."""
        if self.config.clip > 0:
            self._clip((norm / self.config.clip).clamp(min=1.0))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # The fused kernel skips on the device where this is not 0: what torch's GradScaler relies on.
        self.optimizer.found_inf = (~good).float()  # type: ignore[attr-defined]
        # It reads gradients of the master's dtype. Narrower ones are widened by buckets, not all at once.
        portions = [self.held] if self.grad_dtype == self.dtype else [bucket.held for bucket in self.buckets]
        for portion in portions:
            for held in portion.values():
                held.master.grad = held.grad.to(held.master.dtype)
            self.optimizer.step()
            for held in portion.values():
                held.master.grad = None
        self.publish()
        for bucket in self.buckets:
            bucket.clear()

    def _clip(self, divisor: Tensor) -> None:
        """By the fused kernel, which divides as it reads. It takes a float32 scalar alone, made as it is for
        GradScaler: float64 is divided here."""
        if self.dtype == torch.float32:
            self.optimizer.grad_scale = divisor  # type: ignore[attr-defined]
        else:
            for bucket in self.buckets:
                bucket.flat.div_(divisor)

    def publish(self) -> None:
        """Masters have changed: what forward uses follows them."""
        for held in self.held.values():
            if held.parameter.dtype != held.master.dtype:
                held.parameter.data.copy_(held.master)

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
            "parameters": [*(h.parameter for h in self.held.values()), *self._untrained().values()],
            "master": [h.master for h in self.held.values()],  # where it is not the parameter itself
            "gradients": [b.flat for b in self.buckets],
            "optimizer": [t for t in moments if isinstance(t, Tensor)],
        }
