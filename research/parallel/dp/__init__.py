"""Data parallelism. See README.md beside this file."""

from collections.abc import Callable, Iterator, Mapping

import torch

from research.built import Built
from research.config import RunConfig, degrees
from research.mesh import Mesh
from research.models.batch import Batch
from research.models.products import Products
from research.models.seams import Seam
from research.parallel.dp.zero import Zero
from research.problems import Problem, divisors
from research.train.storage import Storage


class DataParallel:
    """Every rank takes its rows of each global microbatch, and holds the same weights or shards of them.

    Gradients are summed over `Mesh.replicas` like those of any copied parameter, and loss terms are sums over a global
    count, so no average appears.
    """

    name = "dp"
    splits: Mapping[str, str] = {}

    def problems(self, config: RunConfig) -> Iterator[Problem]:
        smallest = config.train.global_batch // config.train.microbatches
        if config.dp.degree > smallest > 0:
            rule = f"leaves ranks without a sample: the smallest microbatch has {smallest} (train.global_batch"
            rule += f"={config.train.global_batch} over train.microbatches={config.train.microbatches})"
            yield Problem("dp.degree", config.dp.degree, rule, f"1 to {smallest}")
        yield from self._replicas(config)
        if config.dp.grad_dtype == "bfloat16" and config.train.dtype == "float64":
            yield Problem("dp.grad_dtype", "bfloat16", "is too coarse for train.dtype=float64", "float32")

    def _replicas(self, config: RunConfig) -> Iterator[Problem]:
        dp, sizes = config.dp, degrees(config)
        if dp.degree % dp.replicas:
            yield Problem("dp.replicas", dp.replicas, f"must divide dp.degree={dp.degree}", divisors(dp.degree))
            return
        inside = dp.degree // dp.replicas * sizes["cp"] * sizes["tp"]
        folded = sizes["ep"] * sizes["etp"]
        if dp.replicas > 1 and inside % folded and folded % inside:  # without replicas it is ep that does not fit
            rule = (
                f"leaves {inside} ranks in a replica, which must divide ep.degree*ep.tensor={folded} or be a multiple"
            )
            yield Problem("dp.replicas", dp.replicas, rule, divisors(dp.degree))

    def seams(self, config: RunConfig, mesh: Mesh, products: Products) -> Mapping[str, Seam]:
        return {}

    def wraps(self, config: RunConfig, mesh: Mesh) -> Mapping[str, Callable[[Seam], Seam]]:
        return {}

    def cut_batch(self, batch: Batch, config: RunConfig, mesh: Mesh) -> Batch:
        """Rows of this rank; where they do not divide, the first ranks take one more."""
        return batch.part(mesh.at["dp"], mesh.sizes["dp"])

    def storage(self, config: RunConfig, built: Built, device: torch.device) -> Storage:
        grad_dtype = torch.bfloat16 if config.dp.grad_dtype == "bfloat16" else None
        if config.dp.zero == 0:
            return Storage(built, config.train, device, grad_dtype)
        return Zero(built, config.train, device, grad_dtype, config.dp)

    def makes_parameters(self, config: RunConfig) -> bool:
        return config.dp.zero == 3
