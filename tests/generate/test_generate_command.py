"""The command that generates: the same text from any layout, and what it refuses."""

import dataclasses
import json
import random
import sys
from pathlib import Path

import pytest
import torch

from experiments import generate
from experiments.command import main
from research.build import build
from research.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from research.data.tokenizers import Bytes, Library
from research.mesh import Mesh
from research.settings import to_mapping
from research.train.checkpoint.whole import write_weights
from research.weights.folder import export
from tests.weights.cases import ORACLES, model_of, random_weights

PROMPTS = ("--prompt", "def f(x):", "--prompt", "é", "--prompt", "import os, sys")
MODEL = ModelConfig(layers=2, dim=32, heads=4, init_std=0.4, mtp_depth=1, capacity=1.25, bias_rate=0.1)
CONFIG = RunConfig(model=MODEL, train=TrainConfig(dtype="float64"), data=DataConfig(sequence=48))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """With logits far enough from each other for greedy texts that differ."""
    place = tmp_path_factory.mktemp("generate") / "checkpoint"
    model = build(CONFIG, Mesh({}), torch.device("cpu")).model
    write_weights(place, ((n, p.detach()) for n, p in model.named_parameters()), to_mapping(CONFIG))
    return place


@pytest.fixture
def run(monkeypatch, capsys):
    def go_on(*words):
        after = next((i for i, w in enumerate(words, 1) if isinstance(w, Path)), len(words))
        words = [*map(str, words[:after]), "launch.threads=1", *map(str, words[after:])]
        monkeypatch.setattr(sys, "argv", ["generate", *words])
        status = main(generate.__doc__, generate.go_on, needs="checkpoint or folder")
        said = capsys.readouterr()
        return status, said.out, said.err

    return go_on


DRAWN = "generate.temperature=1 generate.top_p=0.9 generate.seed=3"


@pytest.mark.parametrize(
    "how, layouts", [("", ["pp.degree=2 tp.degree=2"]), (DRAWN, ["tp.degree=2", "tp.degree=2 dp.degree=2"])]
)
def test_any_layout_and_batch_gives_the_same_texts(run, checkpoint, how, layouts):
    words = (checkpoint, *PROMPTS, "generate.tokens=20", *how.split())
    status, text, told = run(*words)
    assert status == 0 and text.count("[length, 20 tokens]") == 3 and text.startswith("def f(x):")
    assert told.startswith("left out: model.mtp_depth=1 model.capacity=1.25\n")
    assert " tokens/s, 512 bytes of cache a token on each rank\n" in told  # 2 layers * 2 * 2 kv heads * 8 * 8 bytes
    for layout in layouts:
        assert run(*words, *layout.split())[:2] == (0, text), layout
    for batch in ("generate.cache_tokens=48", "generate.block=1"):
        assert run(*words, batch)[:2] == (0, text), batch
    if how:
        assert run(*words, "generate.seed=4")[1] != text


def test_planted_draws_of_ranks(run, checkpoint, monkeypatch):
    """Each rank draws one number after another: texts then depend on the layout and on who else is in the batch."""
    numbers = random.Random(0)
    monkeypatch.setattr("research.generate.decode.draw", lambda *_: numbers.random())
    words = (checkpoint, *PROMPTS, "generate.tokens=20", *DRAWN.split())
    text = run(*words)[1]
    assert run(*words, "dp.degree=2")[1] != text != run(*words, "generate.cache_tokens=48")[1]


def test_more_ranks_than_prompts(run, checkpoint, monkeypatch, capsys):
    """Options may come first, and a text may look like one."""
    words = ("--prompt", "def f(x):", "--prompt=--json", checkpoint, "generate.tokens=3")
    status, text, told = run(*words, "dp.degree=3")
    assert (status, text) == run(*words)[:2] and status == 0 and "--json" in text
    assert " tokens/s, 512 bytes of cache a token on each rank\n" in told
    monkeypatch.setattr(sys, "argv", ["generate", "--prompt", "a"])
    assert main(generate.__doc__, generate.go_on) == 2
    assert "is given no model; legal: the folder of a checkpoint, of a run or a Hugging" in capsys.readouterr().err


def test_json_and_stop(run, checkpoint):
    words = (checkpoint, *PROMPTS, "--json", "generate.tokens=20", "generate.temperature=1")
    found = json.loads(run(*words)[1])
    assert found["cache_bytes_per_token"] == 512 and found["tokens_per_s"] > 0
    first = found["texts"][0]
    assert first["prompt"] == "def f(x):" and bytes(first["prompt_ids"]) == b"def f(x):" and len(first["ids"]) == 20
    stop = first["text"][5:7]
    cut = json.loads(run(*words, f"--stop={stop}", "--stop", "no such text")[1])["texts"]
    assert cut[0]["text"] == first["text"][: first["text"].index(stop)] and cut[0]["ended"] == "stop"
    assert first["ids"][: len(cut[0]["ids"])] == cut[0]["ids"]
    assert [t["ended"] == "stop" for t in cut[1:]] == [stop in t["text"] for t in found["texts"][1:]]


def test_the_end_of_a_text(run, checkpoint, monkeypatch):
    words = (checkpoint, *PROMPTS, "--json", "generate.tokens=20", "generate.temperature=1")
    ids = json.loads(run(*words)[1])["texts"][0]["ids"]
    monkeypatch.setattr("research.data.tokenizers.Bytes.end", ids[6])
    text = json.loads(run(*words)[1])["texts"][0]
    assert text["ended"] == "end" and text["ids"] == ids[: ids.index(ids[6]) + 1]


FIRST = 274


@pytest.fixture
def folder(tmp_path):
    """Of a family, with a tokenizer that puts a first token before each text."""
    kind, _, changes = ORACLES["llama"]
    model = dataclasses.replace(model_of(changes), vocab=300)
    export(random_weights(model), tmp_path / "hf", family=kind.model_type, positions=48)
    made = json.loads(Library.train(["a text of some words, and words of a text"] * 3, 290).to_json())
    assert len(made["model"]["vocab"]) == FIRST
    first = {"id": FIRST, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False}
    made["added_tokens"].append({**first, "normalized": False, "special": True})
    special = {"<s>": {"id": "<s>", "ids": [FIRST], "tokens": ["<s>"]}}
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    made["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(made))
    return tmp_path / "hf"


def test_a_hugging_face_folder(run, folder):
    words = (folder, "--prompt", "words <s>", "--prompt", "text", "--json", "generate.tokens=8")
    status, text, _ = run(*words)
    found = json.loads(text)["texts"]
    assert status == 0 and [t["prompt_ids"][0] for t in found] == [FIRST] * 2 and found[0]["prompt_ids"][-1] == FIRST
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, found[1]["ids"][2]]}))
    ended = json.loads(run(*words)[1])["texts"][1]
    assert ended["ended"] == "end" and ended["ids"] == found[1]["ids"][: len(ended["ids"])]
    assert json.loads(run(*words, "tp.degree=2", "train.dtype=float64")[1])["texts"][1]["ids"] == ended["ids"]
    (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')
    assert "eos_token_id=x in generation_config.json is no id; legal: an integer, a list" in run(*words)[2]


def test_what_a_folder_lacks(run, folder):
    (folder / "tokenizer.json").unlink()
    status, _, told = run(folder, "--prompt", "x")
    rule = "tokenizer.json does not exist: who made the ids is not known"
    legal = "data.tokenizer=bytes, or data.tokenizer=PATH of a tokenizer.json"
    assert status == 2 and f"  - {folder}/{rule}; legal: {legal}\n" in told
    assert run(folder, "--prompt", "x", "data.tokenizer=bytes", "generate.tokens=2")[0] == 0
    (folder / "config.json").unlink()
    told = run(folder, "--prompt", "x")[2]
    assert f"{folder} holds no complete checkpoint; legal: the folder of a checkpoint, of a run or a Hugging" in told


def test_an_empty_prompt(run, folder):
    """Where the tokenizer puts a first token before a text there is one to go on from."""
    words = ("--prompt", "", "--prompt=", "--json", "generate.tokens=3")
    status, text, _ = run(folder, *words)
    assert status == 0 and [t["prompt_ids"] for t in json.loads(text)["texts"]] == [[FIRST]] * 2
    made = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**made, "post_processor": None}))
    status, _, told = run(folder, *words)
    assert status == 2
    assert "--prompt '' has no token to go on from: the tokenizer puts none before a text; legal: a text" in told


LONG = (
    "--prompt 'def f(x):' has 9 tokens, and generate.tokens=64 more end past the 48 positions that the model was made "
)


@pytest.mark.parametrize(
    "words, told",
    [
        ((), "--prompt is missing; legal: --prompt TEXT, once or more"),
        (("--prompt",), "--prompt names no text; legal: --prompt TEXT"),
        (
            ("--prompt", ""),
            "--prompt '' has no token to go on from: the tokenizer puts none before a text; legal: a te",
        ),
        ((*PROMPTS, "--stop="), "--stop names no text"),
        (("--prompt", "--json", *PROMPTS), "--prompt names no text; legal: --prompt TEXT, or --prompt=TEXT"),
        (("--prompt", "a\udcff"), "--prompt 'a\\udcff' is not UTF-8"),
        (PROMPTS, LONG + "for (data.sequence, or what RoPE is scaled to); legal: at most 39 more, or another"),
        ((*PROMPTS, "generate.top_p=1.1"), "generate.top_p=1.1 is out of range; legal: 1e-09 to 1"),
        ((*PROMPTS, "generate.top_p=0"), "generate.top_p=0 is out of range"),
        ((*PROMPTS, "generate.temperature=-1"), "generate.temperature=-1 is out of range"),
        ((*PROMPTS, "generate.token=3"), "generate.token=3 is not a key, did you mean generate.tokens?"),
        ((*PROMPTS, "--jsn"), "--jsn is not a setting"),
        ((*PROMPTS, "generate.cache_tokens=8"), "is less than a block of generate.block=16; legal: 0, or at least 16"),
        (
            (*PROMPTS, "generate.cache_tokens=31", "generate.tokens=20"),
            "generate.cache_tokens=31 has no room for the 28 tokens that are kept of --prompt 'def f(x):' with "
            "generate.tokens=20; legal: 0, or at least 32",
        ),
        ((*PROMPTS, "tp.degree=3"), "tp.degree=3 must divide model.heads=4; legal: 1, 2, 4"),
        ((*PROMPTS, "cp.degree=2"), "cp.degree=2 is for training: each cache holds whole texts; legal: 1"),
        ((*PROMPTS, "model.capacity=2"), "model.capacity=2 would let texts change each other; legal: 0"),
        ((*PROMPTS, "model.mtp_depth=1"), "model.mtp_depth=1 is no part of generation; legal: 0"),
        ((*PROMPTS, "model.layers=3"), "layers.2.attention.wq is missing"),
        ((*PROMPTS, "model.layers=1"), "layers.1.attention.wq is no part of this model"),
        ((*PROMPTS, "model.ffn=64"), "layers.0.ffn.w_gate=[128, 32] has another shape; legal: [64, 32]"),
        ((*PROMPTS, "data.path=x.bin"), "data.tokenizer=bytes is the default: who made the ids of data.path is not"),
    ],
)
def test_refused(run, checkpoint, words, told):
    status, text, said = run(checkpoint, *words)
    assert (status, text) == (2, "") and told in said


def test_no_model_there(run, tmp_path):
    status, _, told = run(tmp_path / "none", *PROMPTS)
    legal = "the folder of a checkpoint, of a run or a Hugging Face folder"
    assert (status, told) == (2, f"{tmp_path / 'none'} does not exist; legal: {legal}\n")
    (tmp_path / "file").write_text("")
    assert f"file is no folder; legal: {legal}" in run(tmp_path / "file", *PROMPTS)[2]


def test_a_damaged_file_is_named(run, checkpoint):
    (file,) = checkpoint.glob("*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        for layout in ("", "tp.degree=2"):
            status, text, told = run(checkpoint, *PROMPTS, "generate.tokens=2", *layout.split())
            assert (status, text) == (2, "")
            none = "; there is no other complete checkpoint beside it"
            damage = f"checkpoint {checkpoint} is damaged:\n  - {file} was altered: its checksum differs{none}\n"
            assert told.endswith(f"1 problem in the config:\n  - {damage}")
        file.write_bytes(whole[:-1])
        told = run(checkpoint, "--prompt", "x" * 99)[2]  # which is too long as well
        cut = f"{file} has {len(whole) - 1} bytes instead of {len(whole)}"
        assert told == f"{checkpoint} is damaged:\n  - {cut}{none}\n"
    finally:
        file.write_bytes(whole)


def test_a_checkpoint_of_a_run_with_a_trained_tokenizer(run, tmp_path, text, monkeypatch, capsys):
    """Made by the run itself under another layout. Exported, it says the same without the text; another text is
    refused, as its tokenizer would be another."""
    from experiments.convert import convert
    from experiments.run import train

    words = ["model.layers=1", "model.vocab=260", "data.tokenizer=bpe", "data.bpe_vocab=260", f"data.path={text}"]
    words += ["model.experts=0", "model.init_std=0.4"]
    words += [f"data.cache={tmp_path}/cache", f"record.folder={tmp_path}/out", "train.steps=1", "checkpoint.every=1"]
    monkeypatch.setattr(sys, "argv", ["run", *words, "tp.degree=2", "launch.threads=1", "train.dtype=bfloat16"])
    assert main(None, train) == 0
    capsys.readouterr()
    (place,) = (tmp_path / "out" / "checkpoints").iterdir()
    asked = ("--prompt", "line", "--prompt", "a small text, 16", "--json", "generate.tokens=12")
    status, found, _ = run(place, *asked)
    texts = json.loads(found)["texts"]
    assert status == 0 and all(i < 260 for t in texts for i in t["ids"])
    assert convert(["export", str(place), str(tmp_path / "hf")], None) == 0
    assert ", tokenizer.json, tokenizer_config.json, generation_config.json -> " in capsys.readouterr().out
    assert json.loads(run(tmp_path / "hf", *asked, "train.dtype=bfloat16")[1])["texts"] == texts
    (tmp_path / "hf" / "tokenizer.json").write_text(Bytes().to_json())  # planted: another one
    assert json.loads(run(tmp_path / "hf", *asked, "train.dtype=bfloat16")[1])["texts"] != texts
    text.write_text(text.read_text() + "more text")
    status, _, told = run(place, "--prompt", "line")
    assert status == 2 and "is not the text any more that the tokenizer was trained on" in told
