"""The table of a sweep that people watch: at a terminal it lives, elsewhere a line tells each change."""

import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from research.ablation import Plan
from research.attempts import BAD, Attempt, folder_of, progress_of
from research.config import RunConfig
from research.record import read, row_path, run_id
from research.sweep.state import standing

REFRESH_S = 0.5
LINE_S = 10.0  # between two lines of progress where there is no terminal
STYLES = {"done": "green", "running": "cyan", "cancelled": "yellow", "impossible": "magenta"} | dict.fromkeys(
    BAD, "red"
)
COLUMNS = ("arm", "seed", "state", "step", "tokens/s", "loss")
NOTHING = ("", "", "")


class Board:
    """`with Board(..) as board`: call `refresh` often; it looks as often as makes sense."""

    def __init__(self, plan: Plan, runs: Sequence[RunConfig], console: Console) -> None:
        self._plan, self._runs, self._console = plan, runs, console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._done: dict[str, tuple[str, ...]] = {}  # numbers of rows, which do not change
        self._looked = self._said = time.monotonic()

    def __enter__(self) -> "Board":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self.refresh(now=True)
            self._live.stop()

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def refresh(self, config: RunConfig | None = None, now: bool = False) -> None:
        """`config` is the run that is under way here."""
        moment = time.monotonic()
        if self._live is not None and (now or moment - self._looked > REFRESH_S):
            self._looked = moment
            self._live.update(self.table(), refresh=True)
        elif self._live is None and config is not None and moment - self._said > LINE_S:
            self._said = moment
            step, speed, loss = _numbers_of_progress(config)
            if step:
                self.say(f"    step {step}, loss {loss}, {speed} tokens/s")

    def table(self) -> Group:
        """Every run as it stands, the arms that are impossible as expected, and below why."""
        stand = standing(self._runs)
        table = Table(title=self._plan.ablation.name)
        for name in COLUMNS:
            table.add_column(name, justify="left" if name in ("arm", "state") else "right", no_wrap=True)
        for config in self._runs:
            table.add_row(*self._cells(config, stand))
        for arm in self._plan.impossible:
            table.add_row(Text(arm), "", Text("impossible", STYLES["impossible"]), *NOTHING)
        odd = [a for a in stand.values() if a.state not in ("done", "running") and a.evidence]
        notes = [f"{a.arm}, seed {a.seed}: {a.reason}" for a in odd]
        notes += [f"{arm}: impossible: {why}" for arm, why in self._plan.impossible.items()]
        return Group(table, *map(Text, notes))

    def _cells(self, config: RunConfig, stand: Mapping[str, Attempt]) -> list[Text]:
        attempt, r = stand[run_id(config)], config.record
        seed = str(config.train.seed) + (f" ({r.repeat + 1})" if self._plan.ablation.repeats > 1 else "")
        if attempt.state == "done":
            numbers = self._done.setdefault(attempt.run_id, _numbers_of_row(config))
        else:
            numbers = _numbers_of_progress(config) if attempt.tries else NOTHING
        return [Text(r.arm), Text(seed), Text(attempt.state, STYLES.get(attempt.state, "")), *map(Text, numbers)]


def _numbers_of_row(config: RunConfig) -> tuple[str, ...]:
    row = read(row_path(config.record.folder, run_id(config)))
    speed = f"{row.tokens_per_s:,.0f}" if row.timed_steps else ""
    return f"{len(row.losses)}/{config.train.steps}", speed, f"{row.loss:.4f}"


def _numbers_of_progress(config: RunConfig) -> tuple[str, ...]:
    p = progress_of(folder_of(config))
    if not p.step:
        return NOTHING
    speed = "" if p.tokens_per_s is None else f"{p.tokens_per_s:,.0f}"
    return f"{p.step}/{p.steps}", speed, "" if p.loss is None else f"{p.loss:.3f}"
