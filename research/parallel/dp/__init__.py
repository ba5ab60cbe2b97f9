"""Data parallelism. See README.md beside this file."""

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction

from research.config import Problem, RunConfig
from research.mesh import Mesh
from research.models.batch import Batch
from research.models.kernels import Products
from research.models.seams import Seam


class DataParallel:
    """Every rank holds the same weights and takes its rows of each global microbatch.

    Nothing else is needed here: gradients are summed over `Mesh.replicas` like those of any copied parameter, and loss
    terms are sums over a global count, so no average appears.
    """

    name = "dp"
    splits: Mapping[str, str] = {}

    def problems(self, config: RunConfig) -> Iterator[Problem]:
        smallest = config.train.global_batch // config.train.microbatches
        if config.dp.degree > smallest > 0:
            rule = f"leaves ranks without a sample: the smallest microbatch has {smallest} (train.global_batch"
            rule += f"={config.train.global_batch} over train.microbatches={config.train.microbatches})"
            yield Problem("dp.degree", config.dp.degree, rule, f"1 to {smallest}")

    def seams(self, config: RunConfig, mesh: Mesh, products: Products) -> Mapping[str, Seam]:
        return {}

    def wraps(self, config: RunConfig, mesh: Mesh) -> Mapping[str, Callable[[Seam], Seam]]:
        return {}

    def cut_batch(self, batch: Batch, config: RunConfig, mesh: Mesh) -> Batch:
        """Rows of this rank; where they do not divide, the first ranks take one more."""
        return batch.map(lambda t: t.tensor_split(mesh.sizes["dp"])[mesh.at["dp"]])


def gradient_bytes(parameters: int, grad_bytes: int, ranks: int) -> Fraction:
    """Bytes that one rank receives to sum the gradients of `parameters` over `ranks` once: 2 (n-1)/n of them."""
    return Fraction(2 * (ranks - 1) * parameters * grad_bytes, ranks)
