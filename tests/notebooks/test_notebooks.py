"""Every notebook runs from top to bottom over rows that it has never seen."""

import dataclasses
import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from research.record import read, write

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs_over_synthetic_rows(notebook, tmp_path):
    template = read(ROOT / "tests" / "report" / "row.json")
    traffic = {"dp": {"gradients/all_reduce/backward": 1048576.0}}
    write(template, tmp_path / "results")
    write(dataclasses.replace(template, run_id="two", arm="dp2", comm_bytes=traffic), tmp_path / "results")
    copy = tmp_path / "notebooks" / notebook.name
    copy.parent.mkdir()
    shutil.copy(notebook, copy)
    done = nbformat.read(copy, as_version=4)
    NotebookClient(done, timeout=60, resources={"metadata": {"path": str(copy.parent)}}).execute()
    outputs = [o for cell in done.cells for o in cell.get("outputs", [])]
    assert not [o.text for o in outputs if o.get("name") == "stderr"]
    shown = [kind for o in outputs for kind in o.get("data", {})]
    assert shown.count("image/png") == 2
    assert shown.count("text/html") == 2
    assert "dp2" in str(outputs) and "gradients/all_reduce/backward" in str(outputs)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_imports_research_only_and_holds_no_logic(notebook):
    cells = [c for c in nbformat.read(notebook, as_version=4).cells if c.cell_type == "code"]
    code = [line.strip() for c in cells for line in c.source.splitlines()]
    imports = [line for line in code if line.startswith(("import ", "from "))]
    assert imports and all(line.startswith("from research") for line in imports)
    assert not [line for line in code if line.startswith(("def ", "class ", "for ", "while ", "if "))]


def test_there_are_notebooks():
    assert NOTEBOOKS
