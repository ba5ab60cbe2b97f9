"""Every part in exactly one stage, for all sizes; costs as even as a full search finds."""

import itertools
import random
from collections import Counter
from itertools import pairwise

import pytest
import torch

from experiments.command import CHECKS
from research.config import ModelConfig
from research.models.decoder import Decoder, names_of, specs
from research.models.flops import flops_by_part, flops_per_token
from research.parallel.pp import PipelineParallel
from research.parallel.pp.cut import by_cost, by_list, cut_of, evenly, row_of
from research.settings import load


def layers_of(cut):
    return [sum(part.startswith("layers") for part in held) for held in cut]


@pytest.mark.parametrize("ranks", range(1, 9))
def test_even_cuts_lose_no_layer(ranks):
    for per_rank, layers in itertools.product(range(1, 5), range(41)):
        stages = ranks * per_rank
        if stages > layers + 2:
            with pytest.raises(ValueError, match=f"stages={stages} do not fit layers={layers}"):
                evenly(layers, stages)
            continue
        cut = evenly(layers, stages)
        assert len(cut) == stages and all(cut)
        assert sum(cut, ()) == row_of(layers)  # in order, none twice, none left out
        assert max(layers_of(cut)) - min(layers_of(cut)) <= 1


def test_embedding_and_head_are_the_last_to_get_one_more_layer():
    assert layers_of(evenly(30, 4)) == [7, 8, 8, 7]
    assert layers_of(evenly(7, 4)) == [2, 2, 2, 1]
    assert layers_of(evenly(2, 4)) == [0, 1, 1, 0]


def test_costs_are_cut_optimally():
    """Against every cut there is; what each other stage costs is then bounded by it."""
    draw = random.Random(3)
    for _ in range(300):
        layers = draw.randint(0, 8)
        stages = draw.randint(1, layers + 2)
        costs = {part: draw.choice([0, 1, 2, 7, draw.uniform(0, 9)]) for part in row_of(layers)}
        values = list(costs.values())
        everything = itertools.combinations(range(1, layers + 2), stages - 1)
        best = min(max(sum(values[a:b]) for a, b in pairwise((0, *c, layers + 2))) for c in everything)
        cut = by_cost(costs, stages)
        assert sum(cut, ()) == row_of(layers) and len(cut) == stages and all(cut)
        assert max(sum(costs[part] for part in held) for held in cut) == pytest.approx(best)


def test_a_large_head_gets_a_stage_of_its_own():
    costs = dict.fromkeys(row_of(12), 1.0) | {"embedding": 0.5, "head": 6.0}
    assert layers_of(by_cost(costs, 4)) == [4, 4, 4, 0]
    assert layers_of(by_cost(costs | {"head": 3.0}, 4)) == [3, 4, 4, 1]


def test_an_explicit_list():
    assert by_list(5, [2, 2, 1])[1] == ("layers.2", "layers.3")
    for counts, told in (
        ([2, 2], "must add up to layers=5"),
        ([6, -1], "none below 0"),
        ([], "must add up"),
        ([3, 0, 2], r"leave nothing to stages \[1\]"),
    ):
        with pytest.raises(ValueError, match=told):
            by_list(5, counts)


def test_costs_must_not_be_negative():
    with pytest.raises(ValueError, match="must not be negative"):
        by_cost({"embedding": 1, "head": -1}, 2)


@pytest.mark.parametrize("words", ["", "model.tied=true", "model.attention=mla model.rotary_dim=4 model.mtp_depth=2"])
@pytest.mark.parametrize("cut", ["even", "cost", "0,1,1,2"])
def test_every_parameter_of_a_model_is_in_one_stage(words, cut):
    """And the embedding, the only one twice, where something at the end uses it too."""
    for ranks, name in ((4, "1f1b"), (2, "zbv"), (2, "interleaved")):
        given = [f"pp.degree={ranks}", f"pp.schedule={name}", f"pp.cut={cut}", *words.split()]
        config = load("experiments/configs/tiny.yaml", given, CHECKS)
        with torch.device("meta"):
            declared = specs(Decoder(config.model))
        held = [parts for stages in PipelineParallel().stages(config) for parts in stages.values()]
        counts = Counter(itertools.chain.from_iterable(names_of(parts, declared) for parts in held))
        assert set(counts) == set(declared)
        copied = config.model.tied or config.model.mtp_depth
        assert {n for n, count in counts.items() if count > 1} == ({"embedding.weight"} if copied else set())


def test_the_key_chooses_the_cut():
    """The head of a model with a depth of multi-token prediction is more than a layer."""

    def layers_by_stage(*words):
        return layers_of(cut_of(load("experiments/configs/tiny.yaml", ["model.mtp_depth=1", *words]), 2))

    assert layers_by_stage() == [2, 2]
    assert layers_by_stage("pp.cut=cost") == [3, 1]
    assert layers_by_stage("pp.cut=0,4") == [0, 4]


def test_flops_as_costs():
    """Embedding and head counted: looking up costs nothing, a large vocabulary's head as much as several layers."""
    config = ModelConfig(layers=8, vocab=4096, mtp_depth=1)
    with torch.device("meta"):
        declared = specs(Decoder(config))
    costs = flops_by_part(config, declared, 64, causal=True)
    assert tuple(costs) == row_of(8) and costs["embedding"] == 0
    assert sum(costs.values()) == flops_per_token(config, declared, 64, causal=True)
    counts = layers_of(by_cost(costs, 4))
    assert sum(counts) == 8 and counts[-1] < counts[0]
