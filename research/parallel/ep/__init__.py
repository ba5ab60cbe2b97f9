"""Expert parallelism, folded over the dense axes. See README.md beside this file."""

from collections.abc import Callable, Iterator, Mapping

from research.config import RunConfig, degrees, microbatch_tokens
from research.mesh import Mesh
from research.models.batch import Batch
from research.models.products import Products
from research.models.seams import Seam
from research.parallel.ep.dispatch import DISPATCH, experts
from research.problems import Problem, divisors


class ExpertParallel:
    """Each rank holds some of the routed experts, or a part of each of them (`ep.tensor`), and tokens travel.

    The ranks are those of dp, cp and tp of a stage, counted otherwise (`Mesh`): every one has tokens of its own, which
    it sends once. Tokens cross over and back by collectives that are each other's adjoint, so the gradient of an expert
    is the sum over the ranks that hold a copy of its box, like that of any parameter.
    """

    name = "ep"
    splits: Mapping[str, str] = {"expert": "ep", "expert_ffn": "etp"}

    def problems(self, config: RunConfig) -> Iterator[Problem]:
        ep, c, sizes = config.ep, config.model, degrees(config)
        if ep.degree * ep.tensor == ep.overlap == 1:
            return
        if not c.experts:
            for key, value in (("ep.degree", ep.degree), ("ep.tensor", ep.tensor)):
                if value > 1:
                    yield Problem(key, value, "has no experts to share with model.experts=0", "1")
            return
        if c.experts % ep.degree:
            rule = f"must divide model.experts={c.experts}"
            yield Problem("ep.degree", ep.degree, rule, divisors(c.experts))
        if c.expert_ffn % ep.tensor:
            rule = f"must divide model.expert_ffn={c.expert_ffn}"
            yield Problem("ep.tensor", ep.tensor, rule, divisors(c.expert_ffn))
        stage = sizes["dp"] * sizes["cp"] * sizes["tp"]
        if stage % ep.degree:
            yield Problem("ep.degree", ep.degree, f"must divide dp*cp*tp={stage}", divisors(stage))
        elif stage % (ep.degree * ep.tensor):
            rule = f"must divide dp*cp*tp/ep.degree={stage // ep.degree}"
            yield Problem("ep.tensor", ep.tensor, rule, divisors(stage // ep.degree))
        tokens = max(min(microbatch_tokens(config)) // sizes["tp"], 1)
        if ep.overlap > tokens:
            rule = f"exceeds the {tokens} tokens that a microbatch has of a rank"
            yield Problem("ep.overlap", ep.overlap, rule, f"1 to {tokens}")

    def seams(self, config: RunConfig, mesh: Mesh, products: Products) -> Mapping[str, Seam]:
        group = mesh.group("experts")
        if group.size == 1:
            return {}
        planner = DISPATCH[config.ep.dispatch](group, config.ep.tensor)
        return {"experts": experts(planner, config.ep.overlap)}

    def wraps(self, config: RunConfig, mesh: Mesh) -> Mapping[str, Callable[[Seam], Seam]]:
        return {}

    def cut_batch(self, batch: Batch, config: RunConfig, mesh: Mesh) -> Batch:
        """Whole: the dense axes cut it."""
        return batch
