"""Weights out and in again, bit by bit, and what transformers makes of the folder."""

import pytest
import torch
import transformers

from research.weights.folder import HuggingFaceFolder, export
from tests.models.hugging_face import batch, ours, widened
from tests.weights.cases import ORACLES, model_of, random_weights

V3 = model_of(ORACLES["v3"][2])


def theirs(path):
    """What transformers loads, nothing left over or made up, and its logits in float64."""
    loaded, told = transformers.AutoModelForCausalLM.from_pretrained(
        path, output_loading_info=True, experts_implementation="eager"
    )
    assert not any(told.values()), told
    with widened():
        model = type(loaded)(loaded.config).double()
        model.load_state_dict(loaded.state_dict())
        return loaded, model(input_ids=batch().tokens).logits.detach()


def distance(held, path, changes):
    _, want = theirs(path)
    got = ours({n: t.double() for n, t in held.tensors.items()}, changes).logits
    return float((got - want).norm() / want.norm())


def assert_equal(a, b):
    assert set(a.meta) == set(b.meta)
    for name in a.meta:
        x, y = a.read(name), b.read(name)
        assert x.dtype == y.dtype == a.meta[name].dtype and torch.equal(x, y), name


@pytest.mark.parametrize("name", ORACLES)
def test_out_and_in_again_and_the_same_logits(name, tmp_path):
    kind, _, changes = ORACLES[name]
    held = random_weights(model_of(changes))
    export(held, tmp_path / "out", family=kind.model_type, shard_bytes=20_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    back = HuggingFaceFolder(tmp_path / "out")
    assert_equal(held, back)
    export(back, tmp_path / "again", family=kind.model_type, shard_bytes=20_000)
    for file in sorted((tmp_path / "out").iterdir()):
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name
    assert distance(held, tmp_path / "out", changes) < 1e-9
