"""The command that converts: a folder in and out again, from a checkpoint of any layout, and what it refuses."""

import dataclasses
import json
import shlex
import sys

import pytest
import torch

from experiments import convert
from experiments.command import main
from experiments.run import train
from research.config import RunConfig
from research.data.tokenizers import Library
from research.problems import ConfigError
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


def start_of(said):
    """The words after `experiments.run` of the command that an import prints."""
    return shlex.split(said.splitlines()[-1])[3:]


def files(path):
    return {p.name: p.read_bytes() for p in path.iterdir()}


def test_in_and_out_again(folder, tmp_path, monkeypatch, capsys):
    status, said = run(monkeypatch, capsys, "import", folder, tmp_path / "ckpt")
    assert status == 0 and f"checkpoint.weights={tmp_path / 'ckpt'} model.vocab=50 model.dim=32 " in said
    assert StoredWeights(tmp_path / "ckpt").config["data"]["sequence"] == 48
    assert "data.tokenizer=TOKENIZER" in said  # there is none
    status, said = run(monkeypatch, capsys, "export", tmp_path / "ckpt", tmp_path / "back", "shard_gb=0.00005")
    assert status == 0 and "70 parameters of 98,600 elements" in said
    assert files(tmp_path / "back") == files(folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_words_that_start_from_an_import(dtype, tmp_path, text, monkeypatch, capsys):
    """They work as they are printed: with the tokenizer, the sequence and a dtype that holds the weights, for folders
    whose names are no plain words."""
    source, target = tmp_path / "a folder", tmp_path / "its weights"
    model = dataclasses.replace(model_of(ORACLES["llama"][2]), vocab=300)
    tokenizer = {"tokenizer.json": Library.train([text.read_text()], 300).to_json().encode()}
    export(random_weights(model, dtype), source, positions=32, beside=tokenizer)
    status, said = run(monkeypatch, capsys, "import", source, target)
    start = start_of(said)
    assert status == 0 and f"data.tokenizer={source}/tokenizer.json" in start and "data.sequence=32" in start
    words = [*start, f"data.path={text}", f"data.cache={tmp_path}/cache", f"record.folder={tmp_path}"]
    assert train([*words, "train.steps=1", "train.lr=0", "launch.threads=1", "checkpoint.every=1"], None) == 0
    (made,) = (tmp_path / "checkpoints").iterdir()
    began, now = StoredWeights(target), StoredWeights(made)
    assert all(torch.equal(now.read(n).double(), t.double()) for n, t in began)
    assert now.config["train"]["dtype"] == str(dtype).removeprefix("torch.")
    without = [w for w in words if not w.startswith("train.dtype=")]
    if dtype == torch.float64:  # planted: words that name no dtype
        with pytest.raises(ConfigError, match=r"is torch.float64, which torch.float32 does not hold exactly"):
            train([*without, "launch.threads=1"], None)


def test_a_tokenizer_goes_through(tmp_path, monkeypatch, capsys):
    """In and out again, with the token that ends a text."""
    library = Library.train(["some words of a text"] * 9, 300)
    end = library.encode("words")[:1]
    config = json.dumps({"eos_token": library.decode(end.tolist())}).encode()
    beside = {"tokenizer.json": library.to_json().encode(), "tokenizer_config.json": config}
    model = dataclasses.replace(model_of(ORACLES["llama"][2]), vocab=300)
    export(random_weights(model), tmp_path / "hf", positions=48, beside=beside)
    assert run(monkeypatch, capsys, "import", tmp_path / "hf", tmp_path / "ckpt")[0] == 0
    assert run(monkeypatch, capsys, "export", tmp_path / "ckpt", tmp_path / "back")[0] == 0
    back = files(tmp_path / "back")
    assert json.loads(back.pop("generation_config.json")) == {"eos_token_id": int(end[0])}
    assert back == files(tmp_path / "hf")


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
        (("import", "NONE", "OUT"), "none does not exist; legal: a Hugging Face folder"),
        (("import", "FILE", "OUT"), "config.json is no folder; legal: a Hugging Face folder"),
        (("import", "CKPT", "OUT"), "config.json is missing"),
        (("import", "HF", "OUT", "family=llama"), "family=llama is for an export; legal: without it"),
        (("import", "HF", "OUT", "model.dim=16"), "model.dim=16 is another model than "),
        (("import", "HF", "OUT", "model.dmi=16"), "model.dmi=16 is not a key, did you mean model.dim?"),
        (("import", "HF", "OUT", "dtype=int8"), "dtype=int8 is not known; legal: float32, bfloat16, float64"),
        (("import", "HF", "CKPT"), "holds a checkpoint already"),
        (("import", "HF", "FILE"), "config.json cannot be made: File exists"),
        (("export", "CKPT", "BELOW"), "config.json/below cannot be made: "),
        (("export", "NONE", "OUT"), "none does not exist; legal: the folder of a checkpoint or of a run"),
        (("export", "HF", "OUT"), "holds no complete checkpoint; legal: the folder of a checkpoint or of a run"),
        (("export", "CKPT", "OUT", "data.tokenizer=x.json"), "data.tokenizer=x.json does not exist; legal: bytes, bpe"),
        (("export", "CKPT", "HF"), "exists already; legal: a new or an empty folder"),
        (("export", "CKPT", "OUT", "family=llama"), "model.attention=mla is not possible in llama; legal: gqa"),
        (("export", "CKPT", "OUT", "shard_gb=-1"), "shard_gb=-1 is no size of a file"),
        (("export", "CKPT", "OUT", "model.layers=4"), "layers.3.attention.wo is missing"),
    ],
)
def test_refused_and_nothing_written(words, told, folder, tmp_path, monkeypatch, capsys):
    held = random_weights(V3)
    write_weights(tmp_path / "ckpt", held.tensors.items(), to_mapping(RunConfig(model=V3)))
    places = {n: tmp_path / n.lower() for n in ("HF", "NONE", "OUT", "CKPT")} | {
        "FILE": folder / "config.json",
        "BELOW": folder / "config.json" / "below",
    }
    before = {p.name: files(p) for p in (folder, tmp_path / "ckpt")}
    status, said = run(monkeypatch, capsys, *(places.get(w, w) for w in words))
    assert status == 2 and told in said
    assert {p.name: files(p) for p in tmp_path.iterdir()} == before
