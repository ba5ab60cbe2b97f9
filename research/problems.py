"""What a user got wrong: all of it at once, each by key, value, rule and legal values."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a config: `key=value rule; legal: ...`."""

    key: str
    value: object
    rule: str
    legal: str = ""

    def __str__(self) -> str:
        head = self.key if self.value is None else f"{self.key}={text_of(self.value)}"
        return f"{head} {self.rule}" + (f"; legal: {self.legal}" if self.legal else "")


class ConfigError(ValueError):
    """All problems of a config at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        super().__init__(_listed("in the config", problems))

    def __reduce__(self) -> tuple[type, tuple[list[Problem]]]:
        return ConfigError, (self.problems,)  # a rank hands it to the process that started it


class WeightsError(ValueError):
    """All problems of a folder of weights, or of a model that is to become one."""

    def __init__(self, what: str, problems: Sequence[Problem]) -> None:
        self.what, self.problems = what, list(problems)
        super().__init__(_listed(f"with {what}", problems))

    def __reduce__(self) -> tuple[type, tuple[str, list[Problem]]]:
        return WeightsError, (self.what, self.problems)


def _listed(where: str, problems: Sequence[Problem]) -> str:
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''} {where}:"
    return "\n".join([count, *(f"  - {p}" for p in problems)])


def divisors(n: int) -> str:
    if n > 10**6:
        return f"the divisors of {n}"
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


def text_of(value: object) -> str:
    """A value as a config holds it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value == float(f"{value:g}"):
        return f"{value:g}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(text_of, value))}]"
    return "null" if value is None else str(value)
