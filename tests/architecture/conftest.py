"""The source of the project as syntax trees."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def trees() -> dict[str, ast.Module]:
    """Module name -> tree, of everything in research/ and experiments/."""
    found = {}
    for folder in ("research", "experiments"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    assert len(found) > 40
    return found
