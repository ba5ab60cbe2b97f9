"""One row per run: written whole or not at all, loaded strictly, selected by plain attributes."""

import dataclasses
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from research.config import Problem, RunConfig, Value, to_mapping

Kind = Literal["measured", "dry", "simulated"]

# What says where and how a run is started and recorded, not what it computes.
NOT_IDENTITY = ("record", "launch", "data.cache")


@dataclass(frozen=True)
class Hardware:
    """What the run ran on."""

    device: str
    ranks: int
    nodes: int
    threads: int  # CPU threads of one rank
    torch: str
    python: str


@dataclass(frozen=True)
class Row:
    """All that a table, a plot or a rerun needs of one run."""

    run_id: str
    kind: Kind
    ablation: str
    arm: str
    seed: int
    started: str  # UTC, ISO 8601
    commit: str  # "" outside a git checkout
    dirty: bool
    config: dict[str, dict[str, Value]]
    hardware: Hardware
    parameters: int
    active_parameters: int  # those that one token meets
    unigram_entropy: float  # of the corpus, nats per token
    loss: float  # cross-entropy of the last step, nats per counted token
    losses: list[float]  # of every step
    grad_norms: list[float]  # before clipping
    skipped_steps: int
    tokens: int  # trained on; each once, whatever the layout
    tokens_per_s: float  # warm-up steps left out
    step_ms: float  # median, warm-up steps left out
    step_ms_iqr: float  # interquartile range
    wall_s: float
    flops_per_token: int  # forward and backward of the model, by the convention that is named next
    flops_convention: str
    tflops_per_rank: float  # reached
    mfu: float | None  # that over `record.peak_tflops`; None where no peak is stated
    peak_bytes: dict[str, int]  # by category, in the fullest moment of a step, of the rank that needs most
    rank_peak_bytes: list[int]  # of every rank
    comm_bytes: dict[str, dict[str, float]]  # axis -> purpose/op/phase -> bytes a rank receives in one step, largest
    exposed_comm_ms: dict[str, float]  # axis -> time in which compute stands still for it in one step, largest
    evals: list[list[float]] = field(default_factory=list)  # [steps made, loss of the held-out text] of each evaluation
    eval_loss: float | None = None  # of the last evaluation, nats per counted token
    perplexity: float | None = None  # exp(eval_loss)
    bits_per_byte: float | None = None  # of the held-out text; None where token files do not tell its bytes


def config_hash(config: Mapping[str, Mapping[str, Value]]) -> str:
    """Eight hex digits that change when what is computed changes."""
    what = {
        f"{section}.{key}": value
        for section, keys in config.items()
        for key, value in keys.items()
        if section not in NOT_IDENTITY and f"{section}.{key}" not in NOT_IDENTITY
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:8]


def run_id(config: RunConfig) -> str:
    """The same for the same ablation, arm and config: an arm is done when its row is there."""
    names = [n for n in (config.record.ablation, config.record.arm) if n] or ["run"]
    return "-".join([*names, f"s{config.train.seed}", config_hash(to_mapping(config))])


def problems(config: RunConfig) -> Iterator[Problem]:
    """What would lose the row at the end of a run."""
    for key, value in (("record.ablation", config.record.ablation), ("record.arm", config.record.arm)):
        if not re.fullmatch(r"[\w .+,=()-]{0,60}", value):
            yield Problem(key, value, "is part of a file name", "up to 60 letters, digits, spaces and . + , = ( ) _ -")
    try:
        folder = Path(config.record.folder).absolute()
        there = next(f for f in (folder / "rows", folder, *folder.parents) if f.exists())
        writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    except OSError:
        writable = False
    if not writable:
        legal = "a folder, made where it is missing"
        yield Problem("record.folder", config.record.folder, "cannot be written to", legal)


def row_path(folder: str | Path, identity: str) -> Path:
    return Path(folder) / "rows" / f"{identity}.json"


def write(row: Row, folder: str | Path) -> Path:
    """Write `FOLDER/rows/<run_id>.json`, replacing an earlier row of that run in one step."""
    path = row_path(folder, row.run_id)
    write_atomically(path, json.dumps(dataclasses.asdict(row), indent=1).encode())
    return path


def write_atomically(path: Path, content: bytes) -> None:
    """A reader sees the old file or the whole new one, after a crash too."""
    with atomically(path) as file:
        file.write(content)


@contextmanager
def atomically(path: Path) -> Iterator[IO[bytes]]:
    """As `write_atomically`, for content that comes piece by piece: the file appears when the block ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).chmod(0o644)
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def read(path: str | Path) -> Row:
    """One row. Raises ValueError naming the file and the fields that do not fit."""
    try:
        tree = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no row: {error}") from error
    _require_fields(Row, tree, path)
    _require_fields(Hardware, tree["hardware"], path)
    return Row(**tree | {"hardware": Hardware(**tree["hardware"])})


def load(folder: str | Path) -> list[Row]:
    """All rows of a results folder, by run_id."""
    return [read(p) for p in sorted((Path(folder) / "rows").glob("*.json"))]


def select(rows: Iterable[Row], **wanted: object) -> Iterator[Row]:
    """Rows whose attributes equal `wanted`: `select(rows, ablation="quickstart", kind="measured")`."""
    return (r for r in rows if all(getattr(r, k) == v for k, v in wanted.items()))


def _require_fields(kind: type, tree: Any, path: str | Path) -> None:
    """A field that has a default may be absent: rows outlive the code that wrote them."""
    fields = dataclasses.fields(kind)
    absent = dataclasses.MISSING
    got = set(tree) if isinstance(tree, dict) else set()
    missing = sorted({f.name for f in fields if f.default is absent and f.default_factory is absent} - got)
    extra = sorted(got - {f.name for f in fields})
    if missing or extra:
        raise ValueError(f"{path} is no {kind.__name__}: missing {missing}, unknown {extra}")
