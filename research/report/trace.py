"""One batch through the model of one rank, seam by seam: shapes in, shapes out, bytes from other ranks.

No rank is started: under the fake process group one process stands for any of them. Shapes and bytes are those of a run
with ranks; values are so only of one process.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from research.build import build
from research.built import Built
from research.config import RunConfig
from research.data.tokens import open_tokens
from research.launch.process import Place, fake_process_group, process_group, threads
from research.mesh import Layout, Mesh, total_ranks
from research.models.batch import Batch
from research.models.params import Block
from research.parallel.axis import cut_batch
from research.train.loop import Trainer, train
from research.train.run import global_batches

CALL = ("part", "seam", "call")  # what names a call: part of the model, seam, and which of the part's calls of it


@contextmanager
def on_rank(config: RunConfig, rank: int = 0) -> Iterator[Built]:
    """What `rank` of a layout would hold. Collectives return at once, with whatever is in their buffers."""
    world = total_ranks(config)
    torch.set_num_threads(threads(Place(rank, world, rank, world), config.launch))  # more would wait for each other
    with fake_process_group(world, rank):
        yield build(config, Mesh.from_config(config, world, rank, fake=True), torch.device("cpu"))


def first_microbatch(config: RunConfig) -> Batch:
    """Global microbatch 0 of step 0, whole: the same in every layout."""
    return global_batches(config, open_tokens(config.data)).microbatches_of(0)[0]


def fields(batch: Batch) -> pd.DataFrame:
    """A line for each tensor of a batch: its shape, and how its first sample begins."""
    values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    lines = {name: (tuple(t.shape), f"{t[0, :8].tolist()}"[:-1] + ", ..") for name, t in tensors.items()}
    return pd.DataFrame.from_dict(lines, orient="index", columns=["shape", "first sample"]).rename_axis("tensor")


def trained(config: RunConfig) -> pd.DataFrame:
    """Train in this process, which must be all that the config needs: a line for each step."""
    batches = global_batches(config, open_tokens(config.data))
    with process_group(Place(0, 1, 0, 1), config.launch, "") as device:
        trainer = Trainer(config, Mesh.from_config(config, 1, 0), device)
        steps = pd.DataFrame(list(train(trainer, batches.microbatches_of)))
    return steps.set_index("index")[["loss", "aux", "norm", "tokens"]].rename_axis("step")


def parameters(config: RunConfig, rank: int = 0) -> pd.DataFrame:
    """A line for each parameter: its logical dims, whole shape and elements, what cuts it, shape and elements on
    `rank`, and along which axes its copies lie."""
    with on_rank(config, rank) as built:
        lines = {
            name: (
                ", ".join(spec.dims),
                spec.shape,
                spec.numel,
                _cut(built.layouts[name]),
                tuple(built.model.get_parameter(name).shape),
                built.model.get_parameter(name).numel(),
                built.replicas[name].axis if built.replicas[name].size > 1 else "–",
            )
            for name, spec in built.specs.items()
        }
    columns = ["dims", "shape", "elements", "cut", "shape here", "elements here", "copies along"]
    return pd.DataFrame.from_dict(lines, orient="index", columns=columns).rename_axis("parameter")


def forward_calls(config: RunConfig, batch: Batch, rank: int = 0) -> pd.DataFrame:
    """A line for each seam that forward calls on `rank`, in order: shapes of the activations in and out, and the bytes
    that the rank receives for it (those of seams inside it stand in their own lines)."""
    lines: dict[tuple[str, str, int], tuple[str, str, int]] = {}
    with on_rank(config, rank) as built, torch.no_grad():
        for path, module in built.model.named_modules():
            if isinstance(module, Block):
                names = [f.name for f in dataclasses.fields(module.seams) if f.name != "products"]
                watched: dict[str, Any] = {
                    n: _watched(getattr(module.seams, n), (path, n), lines, built.mesh) for n in names
                }
                module.seams = dataclasses.replace(module.seams, **watched)
        built.model(cut_batch(batch, config, built.mesh))
    return pd.DataFrame.from_dict(lines, orient="index", columns=["in", "out", "bytes received"]).pipe(_named)


def by_counting(configs: Mapping[str, RunConfig], batch: Batch, rank: int, seam: str) -> "pd.Series[int]":
    """Bytes that `rank` receives in all calls of one seam in a forward pass, of each named config."""
    found = {
        n: forward_calls(config, batch, rank)["bytes received"].xs(seam, level="seam") for n, config in configs.items()
    }
    return pd.Series({name: int(received.sum()) for name, received in found.items()}).rename_axis("layout")


def side_by_side(calls: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """What each seam returns: a line for each call, a column for each layout that calls the same seams."""
    return pd.concat({name: frame["out"] for name, frame in calls.items()}, axis=1)


def _cut(layout: Layout) -> str:
    """Such as heads over tp: the dims that more than one rank share."""
    return ", ".join(f"{d} over {s[0]}" for d, s in zip(layout.dims, layout.split, strict=True) if s and s[1] > 1)


def _named(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.set_index(pd.MultiIndex.from_tuples(frame.index, names=CALL)).droplevel(CALL[2])


def _watched(
    seam: Callable[..., Any], name: tuple[str, str], lines: dict[tuple[str, str, int], tuple[str, str, int]], mesh: Mesh
) -> Callable[..., Any]:
    """The seam, which leaves a line whenever it is called."""
    calls = Counter[tuple[str, str]]()

    def call(*args: object, **more: object) -> object:
        place = (*name, calls[name])
        calls[name] += 1
        lines[place] = ("", "", 0)  # where it begins: before the seams that are called inside it
        first, before = len(lines), sum(mesh.ledger.bytes.values())
        out = seam(*args, **more)
        inside = sum(nbytes for _, _, nbytes in list(lines.values())[first:])
        received = int(sum(mesh.ledger.bytes.values()) - before) - inside
        given = [t for t in tree_leaves(args) if not isinstance(t, nn.Parameter)]
        lines[place] = (_shapes(given), _shapes(tree_leaves(out)), received)
        return out

    return call


def _shapes(values: list[object]) -> str:
    """Alike ones once: (8, 64, 16) x2."""
    met = Counter(str(tuple(v.shape)) if v.dim() else "scalar" for v in values if isinstance(v, Tensor))
    return ", ".join(shape if n == 1 else f"{shape} ×{n}" for shape, n in met.items())
