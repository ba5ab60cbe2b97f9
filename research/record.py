"""One row per run: written whole or not at all, loaded strictly, selected by plain attributes."""

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from research.config import RunConfig, SlurmConfig, Value
from research.files import writable, write_atomically
from research.problems import Problem
from research.settings import flat, to_mapping

Kind = Literal["measured", "dry", "simulated"]

# What changes neither a result nor a measurement: where things are put, how a run is watched.
NOT_IDENTITY = (
    *("record.folder", "record.ablation", "record.arm", "record.repeat", "record.tensorboard", "record.profile"),
    *("launch.timeout_s", "data.cache"),
    *(f"slurm.{f.name}" for f in dataclasses.fields(SlurmConfig)),
    *("checkpoint.every", "checkpoint.folder", "checkpoint.keep", "checkpoint.keep_every"),
    *("generate.tokens", "generate.temperature", "generate.top_p", "generate.seed"),
    *("generate.block", "generate.cache_tokens"),
)
# Keys that came after rows which are kept: with these values a run is the one that it was without them.
LATER: Mapping[str, Value] = {"pp.cut": "even"}
SAME_RUN = ("latest", "auto")  # values of checkpoint.resume under which a run goes on as itself


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
    corpus: str  # digest of its contents and tokenizer
    loss: float  # cross-entropy of the last step, nats per counted token
    losses: list[float]  # of every step
    grad_norms: list[float]  # before clipping
    skipped_steps: int
    tokens: int  # trained on; each once, whatever the layout
    tokens_per_s: float  # warm-up steps left out
    step_ms: float  # median, warm-up steps left out
    step_ms_iqr: float  # interquartile range
    timed_steps: int  # 0: the run was all warm-up, and speed is NaN
    wall_s: float  # since it was started, or resumed
    flops_per_token: int  # forward and backward of the model, by the convention that is named next
    flops_convention: str
    tflops_per_rank: float  # reached
    mfu: float | None  # that over `record.peak_tflops`; None where no peak is stated
    peak_bytes: dict[str, int]  # by category, in the fullest moment of a step, of the rank that needs most
    rank_peak_bytes: list[dict[str, int]]  # the same of every rank
    comm_bytes: dict[str, dict[str, float]]  # axis -> purpose/op/phase -> bytes a rank receives in one step, largest
    exposed_comm_ms: dict[str, float]  # axis -> time in which compute stands still for it in one step, largest
    evals: list[list[float]] = field(default_factory=list)  # [steps made, loss of the held-out text] of each evaluation
    eval_loss: float | None = None  # of the last evaluation, nats per counted token
    perplexity: float | None = None  # exp(eval_loss)
    expert_choices: dict[str, list[int]] = field(default_factory=dict)  # MoE layer -> of each expert, over all steps
    dropped_choices: dict[str, list[int]] = field(default_factory=dict)  # of these, beyond the experts' capacity
    max_violation: dict[str, float] = field(default_factory=dict)  # MoE layer -> busiest expert over the mean, less 1
    mtp_losses: list[list[float]] = field(default_factory=list)  # by depth of multi-token prediction, of every step
    overlapped_pairs: str = ""  # how a pipeline's pairs of a forward and a backward ran; "": it has none
    resumed_step: int = 0  # steps that were made before this run went on from a checkpoint
    resumed_from: str = ""  # that checkpoint
    bits_per_byte: float | None = None  # of the held-out text; None where token files do not tell its bytes

    @property
    def speed(self) -> str:
        """As people are told."""
        short = "too few steps to time: record.warmup_steps are left out"
        return f"{self.tokens_per_s:,.0f} tokens/s" if self.timed_steps else short


def identity_of(config: Mapping[str, Mapping[str, Value]]) -> dict[str, Value]:
    """The keys that say what is computed or measured."""
    told = {**LATER, **dict(flat(config))}
    what = {key: meaning(value) for key, value in told.items() if key not in NOT_IDENTITY}
    if what.get("checkpoint.resume") in SAME_RUN:
        what["checkpoint.resume"] = ""
    return what


def config_hash(config: Mapping[str, Mapping[str, Value]]) -> str:
    """Eight hex digits that change when what is computed or measured changes."""
    what = {key: value for key, value in identity_of(config).items() if (key, value) not in LATER.items()}
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:8]


def meaning(value: Value) -> Value:
    """A value of a key; of `file:PATH` the digest of what stands there, wherever it lies."""
    kind, _, path = value.partition(":") if isinstance(value, str) else ("", "", "")
    if kind != "file" or not Path(path).is_file():
        return value
    return f"file:{hashlib.sha256(Path(path).read_bytes()).hexdigest()}"


def run_id(config: RunConfig) -> str:
    """The same for the same ablation, arm, repetition and config: an arm is done when its row is there."""
    r = config.record
    names = [n for n in (r.ablation, r.arm) if n] or ["run"]
    repeat = [f"r{r.repeat}"] if r.repeat else []
    return "-".join([*names, f"s{config.train.seed}", *repeat, config_hash(to_mapping(config))])


def tensorboard_folder(config: RunConfig) -> Path:
    """Runs of one ablation lie side by side under the names of their arms; others under their run_id."""
    root, r = Path(config.record.folder) / "tensorboard", config.record
    return root / r.ablation / run_id(config).removeprefix(f"{r.ablation}-") if r.ablation else root / run_id(config)


def problems(config: RunConfig) -> Iterator[Problem]:
    """What would lose the row at the end of a run."""
    for key, value in (("record.ablation", config.record.ablation), ("record.arm", config.record.arm)):
        if not re.fullmatch(r"[\w .+,=()-]{0,60}", value):
            yield Problem(key, value, "is part of a file name", "up to 60 letters, digits, spaces and . + , = ( ) _ -")
    if not writable(Path(config.record.folder) / "rows"):
        legal = "a folder, made where it is missing"
        yield Problem("record.folder", config.record.folder, "cannot be written to", legal)


def row_path(folder: str | Path, identity: str) -> Path:
    return Path(folder) / "rows" / f"{identity}.json"


def write(row: Row, folder: str | Path) -> Path:
    """Write `FOLDER/rows/<run_id>.json`, replacing an earlier row of that run in one step."""
    path = row_path(folder, row.run_id)
    tree = _nan_as_null(dataclasses.asdict(row))
    write_atomically(path, json.dumps(tree, indent=1, allow_nan=False).encode())
    return path


def _nan_as_null(value: Any) -> Any:
    """JSON knows no NaN and no infinity."""
    if isinstance(value, dict):
        return {k: _nan_as_null(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_nan_as_null(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _null_as_nan(kind: Any, value: Any) -> Any:
    """The way back, where a field is a number, or a list of them or of lists."""
    if kind is float:
        return math.nan if value is None else value
    if get_origin(kind) is list:
        return [_null_as_nan(get_args(kind)[0], v) for v in value]
    return value


def read(path: str | Path) -> Row:
    """One row. Raises ValueError naming the file and the fields that do not fit."""
    try:
        tree = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no row: {error}") from error
    _require_fields(Row, tree, path)
    _require_fields(Hardware, tree["hardware"], path)
    fields = {k: _null_as_nan(kind, tree[k]) for k, kind in get_type_hints(Row).items() if k in tree}
    if fields.get("evals"):  # there was an evaluation, so null is a number that JSON does not know
        fields |= {k: _null_as_nan(float, fields[k]) for k in ("eval_loss", "perplexity")}
    return Row(**fields | {"hardware": Hardware(**tree["hardware"])})


def load(folder: str | Path) -> list[Row]:
    """All rows of a results folder, by run_id."""
    return [read(p) for p in sorted((Path(folder) / "rows").glob("*.json"))]


def select(rows: Iterable[Row], **wanted: object) -> Iterator[Row]:
    """Rows whose attributes equal `wanted`: `select(rows, ablation="quickstart", kind="measured")`."""
    return (r for r in rows if all(getattr(r, k) == v for k, v in wanted.items()))


def _require_fields(kind: Any, tree: Any, path: str | Path) -> None:
    """Fields with a default came later than some rows, which may lack them."""
    names = {f.name for f in dataclasses.fields(kind)}
    needed = {f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING}
    got = set(tree) if isinstance(tree, dict) else set()
    if not isinstance(tree, dict) or needed - got or got - names:
        missing, extra = sorted(needed - got), sorted(got - names)
        raise ValueError(f"{path} is no {kind.__name__}: missing {missing}, unknown {extra}")
