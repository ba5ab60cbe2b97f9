"""Weights from a Hugging Face folder into a checkpoint, and from a checkpoint of any layout into such a folder.

    python -m experiments.convert import HF_FOLDER CHECKPOINT
    python -m experiments.convert import HF_FOLDER CHECKPOINT dtype=float32 model.mtp_depth=0
    python -m experiments.convert export CHECKPOINT HF_FOLDER dtype=bfloat16 family=qwen3_moe shard_gb=5

CHECKPOINT is the folder of one, or for an export that of a run, whose newest one is taken. Words after the folders:
dtype=float64, float32, bfloat16 (without: as it is), family=.. and shard_gb=.. of an export; others are config keys,
which an import writes into the checkpoint and with which an export reads its own. The tokenizer goes along where it can
be found; else the command says why not.
"""

import dataclasses
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from experiments.command import main
from research import settings
from research.built import DTYPES, dtype_name
from research.config import RunConfig
from research.generate.tokenizer import has_tokenizer, tokenizer_files
from research.launch.environment import Joined
from research.problems import ConfigError, Problem, WeightsError
from research.train.checkpoint.index import CheckpointError
from research.train.checkpoint.whole import StoredWeights, write_weights
from research.weights.configs import canonical
from research.weights.files import TOKENIZER
from research.weights.folder import HuggingFaceFolder, export

OWN = ("dtype", "family", "shard_gb")
TRACK = partial(track, console=Console(stderr=True))
USAGE = "import HF_FOLDER CHECKPOINT, or export CHECKPOINT HF_FOLDER"


class Stored:
    """Weights of a checkpoint."""

    def __init__(self, place: str, words: Sequence[str]) -> None:
        self._stored = StoredWeights(place)
        self.config = settings.from_mapping(self._stored.config, words)
        self.model, self.corpus = self.config.model, self._stored.corpus
        entries = self._stored.entries.items()
        self.meta: Mapping[str, Tensor] = {n: torch.empty(e.shape, dtype=e.dtype, device="meta") for n, e in entries}

    def read(self, name: str, expert: int | None = None) -> Tensor:
        if expert is None:
            return self._stored.read(name)
        return self._stored.read(name, ((expert, 1), *((0, n) for n in self.meta[name].shape[1:])))[0]


def take_in(source: Path, target: Path, own: Mapping[str, str], words: Sequence[str]) -> None:
    """A checkpoint of weights alone from a Hugging Face folder."""
    folder = HuggingFaceFolder(source, mtp="model.mtp_depth=0" not in words)
    dtype = _dtype(own)
    data: dict[str, object] = {"tokenizer": str((source / TOKENIZER).resolve())}
    data |= {"sequence": folder.positions} if folder.positions else {}
    train = {"dtype": dtype_name(dtype or folder.meta["embedding.weight"].dtype)}
    config = settings.from_mapping({"model": dataclasses.asdict(folder.model), "data": data, "train": train}, words)
    if canonical(config.model) != canonical(folder.model):
        rule = f"is another model than {source} holds"
        raise ConfigError([Problem(" ".join(words), None, rule, "model.mtp_depth=0, and keys of training")])
    names = TRACK(list(folder.meta), "import")
    write_weights(target, ((n, folder.read(n).to(dtype)) for n in names), settings.to_mapping(config))
    print(f"{folder.family}, {_told(folder.meta)} -> {target}; to start from it, on data.path=stdlib or yours:")
    if lacks := not has_tokenizer(config.data):
        print(f"{config.data.tokenizer} does not exist: TOKENIZER is the path of one, or bytes", file=sys.stderr)
    shown = dataclasses.replace(config.data, tokenizer="TOKENIZER") if lacks else config.data
    start = dataclasses.replace(RunConfig(), model=config.model, data=shown, train=config.train)
    weights = settings.word("checkpoint.weights", str(target))
    print(shlex.join(["python", "-m", "experiments.run", weights, *settings.to_words(start)]))


def take_out(source: Path, target: Path, own: Mapping[str, str], words: Sequence[str]) -> None:
    """A Hugging Face folder from a checkpoint."""
    stored = Stored(str(source), words)
    beside, note = tokenizer_files(stored.config, stored.corpus, words)
    export(
        stored,
        target,
        family=own.get("family"),
        dtype=_dtype(own),
        positions=stored.config.data.sequence,
        shard_bytes=_shard_bytes(own.get("shard_gb", "5")),
        beside=beside,
        watch=partial(TRACK, description="export"),
    )
    print(f"{_told(stored.meta)}{''.join(f', {name}' for name in beside)} -> {target}")
    if note:
        print(note, file=sys.stderr)


def _told(meta: Mapping[str, Tensor]) -> str:
    return f"{len(meta)} parameters of {sum(t.numel() for t in meta.values()):,} elements"


def _dtype(own: Mapping[str, str]) -> torch.dtype | None:
    if "dtype" not in own:
        return None
    if own["dtype"] not in DTYPES:
        raise ConfigError([Problem("dtype", own["dtype"], "is not known", ", ".join(DTYPES))])
    return DTYPES[own["dtype"]]


def _shard_bytes(text: str) -> int:
    try:
        size = float(text) * 1e9
    except ValueError:
        size = math.nan
    if not 0 < size < math.inf:
        raise ConfigError([Problem("shard_gb", text, "is no size of a file", "a number of GB, more than 0")])
    return math.ceil(size)


def convert(words: Sequence[str], where: Joined | None) -> int:
    if where is not None:
        raise ConfigError([Problem("experiments.convert", None, "needs no ranks", "without torchrun or srun")])
    if len(words) < 3 or words[0] not in ("import", "export"):
        raise ConfigError([Problem(" ".join(words), None, "is not a conversion", USAGE)])
    own = {key: value for key, _, value in (w.partition("=") for w in words[3:]) if key in OWN}
    others = [w for w in words[3:] if w.partition("=")[0] not in OWN]
    if words[0] == "import" and (foreign := own.keys() - {"dtype"}):
        raise ConfigError([Problem(key, own[key], "is for an export", "without it") for key in sorted(foreign)])
    step = take_in if words[0] == "import" else take_out
    try:
        step(Path(words[1]), Path(words[2]), own, others)
    except (WeightsError, CheckpointError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(__doc__, convert, needs="conversion"))
