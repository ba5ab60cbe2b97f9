"""An axis can be removed: its folder, its line in the registry, its section of the config. The rest trains."""

import ast
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from research.parallel.axis import AXES
from research.record import load

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from pathlib import Path
import research
from experiments.run import main, train
assert Path(research.__file__).is_relative_to(Path.cwd()), research.__file__
sys.exit(main(None, train))
"""


def edit(path: Path, changes: dict[ast.stmt, str]) -> None:
    """Replace whole statements of a file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for statement, text in sorted(changes.items(), key=lambda item: -item[0].lineno):
        first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))])
        lines[first - 1 : statement.end_lineno] = [text] if text else []
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def unregister(path: Path, axis: str) -> None:
    """Take the import of an axis and its entry out of the registry."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    (line,) = (s for s in body if isinstance(s, ast.ImportFrom) and s.module == f"research.parallel.{axis}")
    names = {alias.asname or alias.name for alias in line.names}
    (registry,) = (s for s in body if isinstance(s, ast.AnnAssign) and ast.unparse(s.target) == "AXES")
    assert isinstance(registry.value, ast.Tuple)
    kept = [e for e in registry.value.elts if not names & {n.id for n in ast.walk(e) if isinstance(n, ast.Name)}]
    assert len(kept) == len(registry.value.elts) - 1
    registry.value.elts = kept
    edit(path, {line: "", registry: ast.unparse(registry)})


def drop_section(path: Path, axis: str) -> None:
    """Take the section of an axis out of the config: its class, and its field in RunConfig."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    classes = {s.name: s for s in body if isinstance(s, ast.ClassDef)}
    (field,) = (s for s in classes["RunConfig"].body if isinstance(s, ast.AnnAssign) and ast.unparse(s.target) == axis)
    edit(path, {field: "", classes[ast.unparse(field.annotation)]: ""})


@pytest.mark.timeout(300)
@pytest.mark.parametrize("axis", [a.name for a in AXES])
def test_the_rest_trains_without(axis: str, tmp_path: Path, text: Path) -> None:
    for folder in ("research", "experiments"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(tmp_path / "research" / "parallel" / axis)
    unregister(tmp_path / "research" / "parallel" / "axis.py", axis)
    drop_section(tmp_path / "research" / "config.py", axis)
    words = ["experiments/configs/tiny.yaml", "train.steps=2", "train.warmup_steps=1", f"data.path={text}"]
    command = [sys.executable, "-c", SCRIPT, *words, "data.cache=cache", "launch.threads=1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    (row,) = load(tmp_path / "results")
    assert axis not in row.config and row.hardware.ranks == 1
    assert all(abs(loss - math.log(250)) < 0.5 for loss in row.losses) and row.losses[1] < row.losses[0]


def test_every_folder_is_registered() -> None:
    folders = {p.name for p in (ROOT / "research" / "parallel").iterdir() if (p / "__init__.py").exists()}
    assert folders == {a.name for a in AXES}
