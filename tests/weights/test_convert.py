"""The command that converts: a folder in and out again, from a checkpoint of any layout, and what it refuses."""

import dataclasses
import sys

import pytest
import torch

from experiments import convert
from experiments.command import main
from research.config import RunConfig
from research.settings import to_mapping
from research.train.checkpoint.index import Entry, Index, stored_name, write_index
from research.train.checkpoint.storage import WEIGHT
from research.train.checkpoint.tensor_file import Pace, write_file
from research.train.checkpoint.whole import StoredWeights, write_weights
from research.weights.folder import HuggingFaceFolder, export
from tests.weights.cases import ORACLES, model_of, random_weights

V3 = dataclasses.replace(model_of(ORACLES["v3"][2]), mtp_depth=1)


@pytest.fixture
def folder(tmp_path):
    export(random_weights(V3), tmp_path / "hf", positions=48, shard_bytes=50_000)
    return tmp_path / "hf"


def run(monkeypatch, capsys, *words):
    """Exit status, and what was said."""
    monkeypatch.setattr(sys, "argv", ["convert", *map(str, words)])
    status = main(convert.__doc__, convert.convert, needs="conversion")
    said = capsys.readouterr()
    return status, said.err if status else said.out


def files(path):
    return {p.name: p.read_bytes() for p in path.iterdir()}


def test_in_and_out_again(folder, tmp_path, monkeypatch, capsys):
    status, said = run(monkeypatch, capsys, "import", folder, tmp_path / "ckpt")
    assert status == 0 and f"checkpoint.weights={tmp_path / 'ckpt'} model.vocab=50 model.dim=32 " in said
    assert StoredWeights(tmp_path / "ckpt").config["data"]["sequence"] == 48
    status, said = run(monkeypatch, capsys, "export", tmp_path / "ckpt", tmp_path / "back", "shard_gb=0.00005")
    assert status == 0 and "70 parameters of 98,600 elements" in said
    assert files(tmp_path / "back") == files(folder)


def test_dtype_and_depths_by_choice(folder, tmp_path, monkeypatch, capsys):
    words = ("dtype=bfloat16", "model.mtp_depth=0")
    assert run(monkeypatch, capsys, "import", folder, tmp_path / "ckpt", *words)[0] == 0
    stored, held = StoredWeights(tmp_path / "ckpt"), random_weights(V3)
    assert stored.config["model"]["mtp_depth"] == 0
    assert set(stored.entries) == {n for n in held.tensors if not n.startswith("mtp.")}
    assert all(torch.equal(t, held.read(n).bfloat16()) for n, t in stored)
    assert run(monkeypatch, capsys, "export", tmp_path / "ckpt", tmp_path / "back", "dtype=float64")[0] == 0
    back = HuggingFaceFolder(tmp_path / "back")
    assert all(torch.equal(back.read(n), held.read(n).bfloat16().double()) for n in stored.entries)


def test_from_boxes_of_many_ranks(tmp_path, monkeypatch, capsys):
    """Matrices cut along each of their dims, experts among them, in one file for each rank."""
    held = random_weights(V3)
    entries, written = {}, ({}, {})
    for number, (name, tensor) in enumerate(held.tensors.items()):
        dim, boxes = number % tensor.ndim, {}
        for rank, part in enumerate(tensor.tensor_split(2, dim)):
            low = rank * (tensor.shape[dim] - part.shape[dim])
            box = tuple((low if d == dim else 0, n) for d, n in enumerate(part.shape))
            written[rank][stored_name(WEIGHT + name, box)] = part.contiguous()
            boxes[box] = f"{rank}.safetensors"
        entries[WEIGHT + name] = Entry(tensor.dtype, tuple(tensor.shape), boxes)
    (tmp_path / "ckpt").mkdir()
    named = {
        f"{r}.safetensors": write_file(tmp_path / "ckpt", f"{r}.safetensors", t, Pace()) for r, t in enumerate(written)
    }
    state = {"config": to_mapping(RunConfig(model=V3))}
    write_index(tmp_path / "ckpt", Index(1, state, named, entries))
    assert run(monkeypatch, capsys, "export", tmp_path / "ckpt", tmp_path / "hf")[0] == 0
    back = HuggingFaceFolder(tmp_path / "hf")
    assert all(torch.equal(back.read(n), t) for n, t in held.tensors.items()) and set(back.meta) == set(held.tensors)


@pytest.mark.parametrize(
    "words, told",
    [
        (("import", "HF"), "is not a conversion; legal: import HF_FOLDER CHECKPOINT, or export CHECKPOINT HF_FOLDER"),
        (("import", "NONE", "OUT"), "config.json is missing"),
        (("import", "HF", "OUT", "family=llama"), "family=llama is for an export; legal: without it"),
        (("import", "HF", "OUT", "model.dim=16"), "model.dim=16 is another model than "),
        (("import", "HF", "OUT", "model.dmi=16"), "model.dmi=16 is not a key, did you mean model.dim?"),
        (("import", "HF", "OUT", "dtype=int8"), "dtype=int8 is not known; legal: float32, bfloat16, float64"),
        (("import", "HF", "CKPT"), "holds a checkpoint already"),
        (("export", "NONE", "OUT"), "holds no complete checkpoint"),
        (("export", "CKPT", "HF"), "exists already; legal: a new or an empty folder"),
        (("export", "CKPT", "OUT", "family=llama"), "model.attention=mla is not possible in llama; legal: gqa"),
        (("export", "CKPT", "OUT", "shard_gb=-1"), "shard_gb=-1 is no size of a file"),
        (("export", "CKPT", "OUT", "model.layers=4"), "layers.3.attention.wo is missing"),
    ],
)
def test_refused_and_nothing_written(words, told, folder, tmp_path, monkeypatch, capsys):
    held = random_weights(V3)
    write_weights(tmp_path / "ckpt", held.tensors.items(), to_mapping(RunConfig(model=V3)))
    places = {n: tmp_path / n.lower() for n in ("HF", "NONE", "OUT", "CKPT")}
    before = {p.name: files(p) for p in (folder, tmp_path / "ckpt")}
    status, said = run(monkeypatch, capsys, *(places.get(w, w) for w in words))
    assert status == 2 and told in said
    assert {p.name: files(p) for p in tmp_path.iterdir()} == before
