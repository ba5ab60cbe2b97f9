"""What is wrong with weights: all of it at once, by name."""

from collections.abc import Sequence

from research.config import Problem


class WeightsError(ValueError):
    """All problems of a folder, or of a model that is to become one."""

    def __init__(self, what: str, problems: Sequence[Problem]) -> None:
        self.what, self.problems = what, list(problems)
        count = f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''} with {what}:"
        super().__init__("\n".join([count, *(f"  - {p}" for p in self.problems)]))

    def __reduce__(self) -> tuple[type, tuple[str, list[Problem]]]:
        return WeightsError, (self.what, self.problems)
