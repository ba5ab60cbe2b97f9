"""transformers' own `generate` as an oracle: the same folder, the same tokens."""

import dataclasses
from functools import partial

import pytest
import torch
import transformers

from research.config import LaunchConfig
from research.generate.run import ending, generate
from research.generate.source import load, open_source, require_fit
from research.launch.local import start
from research.launch.process import Place, fake_process_group
from research.mesh import Mesh, total_ranks
from research.settings import from_mapping
from research.weights.folder import export
from tests.models.hugging_face import widened
from tests.weights.cases import ORACLES, model_of, random_weights

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [7], [27, 18, 28]]
FAMILIES = ["llama", "llama, MQA, biases", "qwen2, window from the second layer", "qwen3 moe", "mixtral, window", "v2"]
FAMILIES += ["v3", "olmo2", "phi3"]
TOKENS = 14
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    def make(name):
        kind, _, changes = ORACLES[name]
        export(random_weights(model_of(changes)), tmp_path / "hf", family=kind.model_type, positions=64)
        return tmp_path / "hf"

    return make


def ours(place, *words):
    source = open_source(place)
    config = from_mapping(source.keys, [f"generate.tokens={TOKENS}", "train.dtype=float64", *words])
    require_fit(source, config)
    run = partial(generate, source, config, PROMPTS, ending((), (), str), config.model.vocab)
    if total_ranks(config) == 1:
        done = [run(Place(0, 1, 0, 1), CPU)]
    else:
        done = start(run, total_ranks(config), LaunchConfig(device="cpu", threads=1), 60.0)
    assert all(d.texts == done[0].texts for d in done)
    return [t.made for t in done[0].texts]


def theirs(place):
    loaded = transformers.AutoModelForCausalLM.from_pretrained(place, experts_implementation="eager")
    with widened():
        model = type(loaded)(loaded.config).double()
        model.load_state_dict(loaded.state_dict())
        given = dict(do_sample=False, max_new_tokens=TOKENS, eos_token_id=None, pad_token_id=0)
        return [model.generate(torch.tensor([p]), **given)[0, len(p) :].tolist() for p in PROMPTS]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_tokens(name, folder):
    place = folder(name)
    want = theirs(place)
    assert len({tuple(made) for made in want}) == 3
    assert ours(place) == want


@pytest.mark.parametrize("name", ["qwen3 moe", "v3"])
def test_the_same_tokens_from_ranks(name, folder):
    place = folder(name)
    layouts = ([], ["tp.degree=2"], ["tp.degree=2", "dp.degree=2", "ep.degree=2", "ep.tensor=2"])
    one, *others = [ours(place, *words) for words in layouts]
    assert others == [one] * 2


@pytest.mark.parametrize("name", ["v3", "phi3"])
def test_ranks_read_their_own_boxes(name, folder):
    """Of each weight as many elements as the rank's box has, and those that stand there."""
    source = open_source(folder(name))
    one = load(source, from_mapping(source.keys), Mesh({}), CPU)
    whole, config = dict(one.model.named_parameters()), from_mapping(source.keys, ["tp.degree=2", "ep.degree=2"])
    for rank in range(2):
        boxes = {}

        def read(name, box, boxes=boxes):
            boxes[name] = box
            return source.read(name, box)

        mesh = Mesh({"tp": 2, "ep": 2}, rank, fake=True)
        with fake_process_group(2, rank):
            built = load(dataclasses.replace(source, read=read), config, mesh, CPU)
        assert boxes == {n: layout.box(mesh.at) for n, layout in built.layouts.items()}
        for n, local in built.model.named_parameters():
            inside = tuple(slice(low, low + size) for low, size in boxes[n])
            assert torch.equal(local[tuple(slice(size) for _, size in boxes[n])], whole[n][inside])
