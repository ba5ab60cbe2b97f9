"""What a config is refused for."""

from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.command import CHECKS
from research import settings
from research.problems import ConfigError


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., list[str]]:
    """The problems of words, of the text of a YAML file, or of both; fails where there are none."""

    def lines(*words: str, text: str | bytes | None = None, world: int | None = None) -> list[str]:
        path = None
        if text is not None:
            path = tmp_path / "some.yaml"
            path.write_bytes(text.encode() if isinstance(text, str) else text)
        with pytest.raises(ConfigError) as caught:
            settings.load(path, words, CHECKS, world)
        found = [str(p) for p in caught.value.problems]
        count, _, told = str(caught.value).partition("\n")
        assert count.startswith(f"{len(found)} problem") and told == "\n".join(f"  - {line}" for line in found)
        return [line.replace(f"{tmp_path}/", "") for line in found]

    return lines
