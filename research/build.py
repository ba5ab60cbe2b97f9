"""From config to a model on this rank: declare on meta, cut by the axes, fill the boxes, attach the seams."""

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from research import comm
from research.built import DTYPES, SHARED, Built, hollow
from research.config import RunConfig
from research.mesh import Box, Group, Layout, Mesh
from research.models import seams
from research.models.decoder import Decoder, Parts, names_of, specs
from research.models.params import Block, Spec
from research.models.products import Products
from research.parallel.axis import AXES, layout_of, staged

Values = Callable[[str, Spec, Layout], Tensor]  # a parameter -> this rank's box of it, padded to its local shape


def build(
    config: RunConfig, mesh: Mesh, device: torch.device, values: Values | None = None, later: bool = False
) -> Built:
    """The model on `device`: with its initial values in float32 (float64 in a float64 run), or with those given; or
    `later`, when the storage asks for those that are trained, one by one."""
    values = values or initial_values(config, mesh, device)
    held = staged(config).stages(config)  # by pp coordinate
    here = dict(held[mesh.at["pp"]])
    with torch.device("meta"):
        declared = specs(Decoder(config.model))
        model = Decoder(config.model, config.train.recompute, united(here.values()))
    layouts = {name: layout_of(spec, mesh) for name, spec in declared.items()}
    # Making groups is collective, so every rank makes those of every parameter, in this order.
    replicas = {name: mesh.replicas(layout) for name, layout in layouts.items()}
    copies = copies_of(held, declared, mesh)
    attached = wired(config, mesh)

    def initial(name: str) -> Tensor:
        return values(name, declared[name], layouts[name])

    for path, module in model.named_modules():
        if isinstance(module, Block):
            module.seams = attached
            for leaf, spec in module.specs.items():
                name = f"{path}.{leaf}".lstrip(".")
                wait = later and spec.trained
                value = hollow(layouts[name].local_shape(), torch.float32, device) if wait else initial(name)
                setattr(module, leaf, nn.Parameter(value, requires_grad=spec.trained))
    stages: dict[str, int] = {}
    for stage, parts in here.items():
        for name in names_of(parts, declared):
            stages[name] = SHARED if name in stages else stage
    dtype = DTYPES[config.train.dtype]
    return Built(model, mesh, declared, layouts, replicas, attached, dtype, here, initial, stages, copies)


def united(parts: Iterable[Parts]) -> Parts:
    found: set[str] = set()
    for some in parts:
        if some is None:
            return None
        found |= set(some)
    return found


def copies_of(held: Sequence[Mapping[int, Parts]], names: Collection[str], mesh: Mesh) -> dict[str, Group]:
    """The ranks across stages that hold the same box, of parameters that are here and elsewhere."""
    holders: dict[str, list[int]] = {name: [] for name in names}
    for coordinate, stages in enumerate(held):
        for name in names_of(united(stages.values()), names):
            holders[name].append(coordinate)
    groups = {name: mesh.holders(tuple(where)) for name, where in holders.items() if len(where) > 1}
    return {name: group for name, group in groups.items() if group.size > 1}


def wired(config: RunConfig, mesh: Mesh) -> seams.Seams:
    products = Products()
    claims = {a.name: a.seams(config, mesh, products) for a in AXES}
    if mesh.stage_ranks > 1:
        # No axis owns counts, they span several. Repeated tokens count repeatedly, also in each term's denominator.
        stage, sample = mesh.group("stage"), mesh.group("sample")
        claims["build"] = {
            "count": summed(seams.count, stage),
            "count_each": summed(seams.count_each, sample),
            "assemble": assembled(stage),
        }
    wraps = [a.wraps(config, mesh) for a in AXES]
    return seams.wire(seams.one_device(products, flash=config.train.kernel == "flash"), claims, wraps)


def summed(counting: Callable[[Tensor, int], Tensor], group: Group) -> seams.Seam:
    """Counts of experts, summed over the ranks that the count is about: the balance loss is one over the whole global
    microbatch, or over whole samples."""

    def count(ids: Tensor, n_experts: int) -> Tensor:
        return comm.all_reduce_(counting(ids, n_experts), group, "expert counts")

    return count


def assembled(group: Group) -> seams.Seam:
    """Values of all tokens: the largest of what each rank knows, or zero, so that any cut of tokens is right, an uneven
    one and one with copies, too."""

    def assemble(values: Tensor, numbers: Tensor, whole: int) -> Tensor:
        return comm.all_reduce_(seams.assemble(values, numbers, whole), group, "expert choices", comm.MAX)

    return assemble


def initial_values(config: RunConfig, mesh: Mesh, device: torch.device) -> Values:
    dtype = torch.float64 if config.train.dtype == "float64" else torch.float32

    def values(name: str, spec: Spec, layout: Layout) -> Tensor:
        return padded_values(config.train.seed, name, spec, layout, mesh, dtype, device)

    return values


def padded_values(
    seed: int, name: str, spec: Spec, layout: Layout, mesh: Mesh, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """This rank's box of a parameter, padded with zeros to its local shape."""
    box = layout.box(mesh.at)
    local = torch.zeros(layout.local_shape(), dtype=dtype, device=device)
    held = local[tuple(slice(size) for _, size in box)]
    if spec.std is None:
        held.fill_(1.0)
    else:
        rows, row_numel = box[0][1], math.prod(size for _, size in box[1:])
        step = max(1, 2**22 // max(row_numel, 1))  # bounds the integer scratch
        for low in range(0, rows, step):
            part = ((box[0][0] + low, min(step, rows - low)), *box[1:])
            held[low : low + step] = normal(seed, name, layout.shape, part, device).mul_(spec.std)
    return local


def normal(seed: int, name: str, shape: tuple[int, ...], box: Box, device: torch.device) -> Tensor:
    """Standard normal values of a box of a global tensor, float64. Element i depends on (seed, name, i) alone, so any
    layout starts from the same weights: SplitMix64 (Steele et al. 2014, figure 17) of a keyed counter, then the
    inverse of the normal distribution function."""
    position = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (offset, size) in enumerate(box):
        stride = math.prod(shape[dim + 1 :])
        index = torch.arange(offset, offset + size, device=device) * stride
        position = position[..., None] + index.view(-1) if dim else index
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little", signed=True)
    z = (position + 1) * _wrap(0x9E3779B97F4A7C15) + key
    z = (z ^ _shift(z, 30)) * _wrap(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _wrap(0x94D049BB133111EB)
    z = z ^ _shift(z, 31)
    return torch.special.ndtri((_shift(z, 11) + 0.5) * 2.0**-53)


def _wrap(constant: int) -> int:
    """An unsigned 64-bit constant as torch's int64 wraps it."""
    return constant - 2**64 if constant >= 2**63 else constant


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical shift right of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
