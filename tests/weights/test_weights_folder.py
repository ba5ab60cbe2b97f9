"""Weights out and in again, bit by bit, and what transformers makes of the folder."""

import dataclasses
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from research.problems import WeightsError
from research.weights.families import FAMILIES
from research.weights.files import INDEX, SINGLE
from research.weights.folder import HuggingFaceFolder, export
from tests.models.hugging_face import batch, ours, widened
from tests.weights.cases import ORACLES, Held, model_of, random_weights

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


@pytest.mark.parametrize("name", ["llama", "mixtral", "v3"])
def test_what_transformers_saves_in_shards_is_read(name, tmp_path):
    kind, given, changes = ORACLES[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(kind(**given))
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert (tmp_path / INDEX).exists()
    folder = HuggingFaceFolder(tmp_path, mtp=False)
    with torch.no_grad():
        want = model(input_ids=batch().tokens).logits
    got = ours({n: folder.read(n).double() for n in folder.meta}, changes).logits
    assert (got - want).norm() < 1e-5 * want.norm()


def with_depths(depth):
    return random_weights(dataclasses.replace(V3, mtp_depth=depth))


@pytest.mark.parametrize("depth", [1, 2])
def test_depths_of_prediction(depth, tmp_path):
    """transformers finds each depth where the released weights have it: a layer after the last."""
    held = with_depths(depth)
    export(held, tmp_path / "out", shard_bytes=20_000)
    main = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[34]\..*"]  # theirs knows the one of 61 layers
    mtp, told = MtpModel.from_pretrained(main), {}
    for k in range(depth):
        told |= {
            f"layers.{k}.enorm.weight": "embedding_norm.weight",
            f"layers.{k}.hnorm.weight": "hidden_norm.weight",
            f"layers.{k}.eh_proj.weight": "projection",
            f"layers.{k}.post_norm.weight": "norm.weight",
            f"layers.{k}.mtp_block.self_attn.o_proj.weight": "layer.attention.wo",
            f"layers.{k}.mtp_block.mlp.experts.down_proj": "layer.ffn.w_down",
            f"layers.{k}.mtp_block.mlp.gate.weight": "layer.ffn.router",
        }
        of = dict(mtp.named_parameters())
        for theirs_, name in told.items():
            if theirs_.startswith(f"layers.{k}."):
                assert torch.equal(of[theirs_], held.read(f"mtp.{k + 1}.{name}")), theirs_
    back = HuggingFaceFolder(tmp_path / "out")
    assert_equal(held, back)
    without = HuggingFaceFolder(tmp_path / "out", mtp=False)
    assert without.model == dataclasses.replace(back.model, mtp_depth=0)
    assert set(without.meta) == {n for n in held.meta if not n.startswith("mtp.")}


def edited(folder, change):
    """A folder of one file, its tensors changed."""
    held = load_file(folder / SINGLE)
    change(held)
    save_file(held, folder / SINGLE)


def problems_of(path, **given):
    with pytest.raises(WeightsError) as error:
        HuggingFaceFolder(path, **given)
    return [str(p) for p in error.value.problems]


def test_copies_may_be_left_out_and_must_be_copies(tmp_path):
    held = with_depths(1)
    export(held, tmp_path / "out")
    copies = ["model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"]
    edited(tmp_path / "out", lambda t: t[copies[1]].add_(1))
    assert problems_of(tmp_path / "out") == [f"{copies[1]} must equal lm_head.weight, which this model shares"]
    edited(tmp_path / "out", lambda t: [t.pop(name) for name in copies])
    assert_equal(held, HuggingFaceFolder(tmp_path / "out"))


def test_missing_depths_are_named_and_can_be_done_without(tmp_path):
    export(random_weights(V3), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    told = problems_of(tmp_path / "out")
    assert all(p.startswith("model.layers.3.") and p.endswith(" is missing") for p in told)
    assert "model.layers.3.eh_proj.weight is missing" in told
    assert HuggingFaceFolder(tmp_path / "out", mtp=False).model.mtp_depth == 0


def test_a_tied_head_may_be_there(tmp_path):
    held = random_weights(model_of(ORACLES["llama, MHA, tied"][2]))
    export(held, tmp_path / "out")
    edited(tmp_path / "out", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    edited(tmp_path / "out", lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert_equal(held, HuggingFaceFolder(tmp_path / "out"))
    edited(tmp_path / "out", lambda t: t["lm_head.weight"].add_(1))
    told = "lm_head.weight must equal model.embed_tokens.weight, which this model shares"
    assert problems_of(tmp_path / "out") == [told]


def test_everything_that_does_not_fit_is_named(tmp_path):
    """A missing expert among it."""
    export(random_weights(model_of(ORACLES["mixtral"][2])), tmp_path / "out")
    expert = "model.layers.1.block_sparse_moe.experts.4"

    def change(t):
        for matrix in ("w1", "w2", "w3"):
            del t[f"{expert}.{matrix}.weight"]
        t["model.layers.0.self_attn.q_proj.weight"] = torch.ones(32, 31)
        t["model.layers.0.self_attn.k_proj.weight"] = torch.ones(16, 32, dtype=torch.int8)
        t["model.layers.3.input_layernorm.weight"] = torch.ones(32)

    edited(tmp_path / "out", change)
    assert sorted(problems_of(tmp_path / "out")) == [
        "model.layers.0.self_attn.k_proj.weight=I8 is not a type of weights; legal: F64, F32, F16, BF16",
        "model.layers.0.self_attn.q_proj.weight=[32, 31] has another shape; legal: [32, 32]",
        f"{expert}.w1.weight is missing",
        f"{expert}.w2.weight is missing",
        f"{expert}.w3.weight is missing",
        "model.layers.3.input_layernorm.weight is no part of this model",
    ]


def test_damaged_folders(tmp_path):
    out = tmp_path / "out"
    export(random_weights(V3), out, shard_bytes=60_000)
    first, second, third = sorted(p.name for p in out.glob("model-*"))[:3]
    index = json.loads((out / INDEX).read_text())
    (out / second).write_bytes((out / second).read_bytes()[:-7])
    (out / third).unlink()
    told = problems_of(out)
    assert len(told) == 2 and told[0].startswith(f"{second} is damaged: ") and told[1] == f"{third} is missing"
    moved = next(n for n, f in index["weight_map"].items() if f == first)
    (out / INDEX).write_text(json.dumps({"weight_map": {moved: "../model.safetensors", "x": first}}))
    told = problems_of(out)
    assert f"{INDEX}=../model.safetensors is not the name of a file in the folder" in told
    assert f"x is not in {first}, as {INDEX} says" in told
    (out / INDEX).write_text("{")
    assert problems_of(out)[0].startswith(f"{INDEX} cannot be read: ")
    (out / INDEX).unlink()
    (out / "pytorch_model.bin").write_bytes(b"pickle")
    assert "holds no safetensors; legal: model.safetensors, or" in problems_of(out)[0]
    (out / "config.json").unlink()
    assert problems_of(out) == ["config.json is missing"]


def test_bfloat16_comes_in_exactly_and_goes_out_by_choice(tmp_path):
    held = random_weights(V3)
    export(held, tmp_path / "out", dtype=torch.bfloat16, shard_bytes=20_000)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    back = HuggingFaceFolder(tmp_path / "out")
    for name, want in held.tensors.items():
        float32 = name.endswith(("ffn.router", "ffn.bias"))
        assert torch.equal(back.read(name), want if float32 else want.bfloat16()), name
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.model.embed_tokens.weight.dtype == torch.bfloat16
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(dict(loaded.named_buffers())[name], held.read("layers.1.ffn.bias"))
    export(back, tmp_path / "wide", dtype=torch.float32)
    wide = HuggingFaceFolder(tmp_path / "wide")
    assert all(torch.equal(wide.read(n), back.read(n).float()) for n in wide.meta)


def test_nothing_is_left_of_a_failed_export(tmp_path):
    held, out = random_weights(V3), tmp_path / "out"

    class Fails(Held):
        def read(self, name, expert=None):
            if name == "layers.2.ffn.w_down":
                raise OSError("gone")
            return super().read(name, expert)

    with pytest.raises(OSError, match="gone"):
        export(Fails(held.model, held.tensors), out, shard_bytes=20_000)
    wrong = {**held.tensors, "layers.0.attention.wq_down": torch.ones(3), "more": torch.ones(1)}
    del wrong["head.norm.weight"]
    with pytest.raises(WeightsError) as error:
        export(Held(held.model, wrong), out)
    assert [str(p) for p in error.value.problems] == [
        "head.norm.weight is missing",
        "layers.0.attention.wq_down=[3] has another shape; legal: [20, 32]",
        "more is no part of this model",
    ]
    with pytest.raises(WeightsError, match="family=bert is not known; legal: llama"):
        export(held, out, family="bert")
    with pytest.raises(WeightsError, match="problems with the model as llama:"):
        export(held, out, family="llama")
    assert list(tmp_path.iterdir()) == []
    out.mkdir()
    (out / "mine").write_text("kept")
    with pytest.raises(WeightsError, match="exists already; legal: a new or an empty folder"):
        export(held, out)
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "mine"]


def test_planted_faults(tmp_path, monkeypatch):
    """Gate and up exchanged; rows of turned elements as they are; experts in another order. All shapes are right."""
    held, v3 = random_weights(V3), FAMILIES["deepseek_v3"]

    def shows(name, held=held):
        export(held, tmp_path / name)
        return distance(random_weights(V3), tmp_path / name, ORACLES["v3"][2]) > 1e-3

    swapped = {"experts.w_gate": v3.layer["experts.w_up"], "experts.w_up": v3.layer["experts.w_gate"]}
    with monkeypatch.context() as patch:
        patch.setitem(FAMILIES, "deepseek_v3", dataclasses.replace(v3, layer={**v3.layer, **swapped}))
        assert shows("swapped")
    for turned in ("heads", "latent"):
        left = {n: t for n, t in v3.turned.items() if t != turned}
        with monkeypatch.context() as patch:
            patch.setitem(FAMILIES, "deepseek_v3", dataclasses.replace(v3, turned=left))
            assert shows(turned)
    rolled = {n: t.roll(1, 0) if n.endswith("ffn.w_down") and t.ndim == 3 else t for n, t in held.tensors.items()}
    assert shows("rolled", Held(V3, rolled))
    assert not shows("right")
