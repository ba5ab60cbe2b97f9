"""Every notebook runs, says again what it has kept, holds no logic, and ends with computed numbers."""

import ast
import copy
import dataclasses
import json
import re

import nbformat
import pytest

from research.record import read, write
from tests.notebooks.conftest import NOTEBOOKS, ROOT

VARIES = "varies"  # tag of a cell whose output rounding or time decide
CONTROL = (ast.For, ast.While, ast.If, ast.IfExp, ast.Try, ast.With, ast.comprehension)
LOGIC = (ast.FunctionDef, ast.ClassDef, ast.Lambda, *CONTROL)
MOST_BYTES = 300 * 2**10

each = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)


def load(path):
    return nbformat.read(path, as_version=4)


def code_of(notebook):
    return [c for c in notebook.cells if c.cell_type == "code"]


def said(cell):
    """The words of a cell's outputs; of pictures only that they are there."""
    words = []
    for output in cell.outputs:
        data = output.get("data", {"text": output.get("text", "")})
        kinds = [k for k in data if k.startswith("image/")] or [k for k in data if k != "text/plain"] or list(data)
        words += [(output.output_type, k, "" if k.startswith("image/") else data[k]) for k in kinds]
    return words


def differences(kept, now):
    """Numbers of the cells that say something else than what is kept."""
    pairs = enumerate(zip(code_of(kept), code_of(now), strict=True))
    return [i for i, (a, b) in pairs if VARIES not in a.metadata.get("tags", []) and said(a) != said(b)]


def tree_of(cell):
    lines = [line for line in cell.source.splitlines() if not line.startswith("%")]
    return ast.parse("\n".join(lines))


@pytest.mark.timeout(200)
@each
def test_says_again_what_it_has_kept(notebook, execute):
    """Where rows or code have changed: `make notebooks`, read the sentences again, commit."""
    kept = load(notebook)
    now = execute(copy.deepcopy(kept))
    assert [o.text for c in code_of(now) for o in c.outputs if o.get("name") == "stderr"] == []
    assert differences(kept, now) == [], "make notebooks"


@each
def test_can_be_read_without_running(notebook):
    kept = load(notebook)
    assert [c.execution_count for c in code_of(kept)] == list(range(1, len(code_of(kept)) + 1))
    outputs = [o for c in code_of(kept) for o in c.outputs]
    assert {o.output_type for o in outputs} <= {"execute_result", "display_data", "stream"}
    text = json.dumps([said(c) for c in code_of(kept)])
    assert not re.findall(r"/(?:home|root|tmp|usr|work|Users|opt|var)/\S*|0x[0-9a-f]{6,}|Warning|\x1b\[", text)
    assert notebook.stat().st_size < MOST_BYTES
    assert any(k.startswith("image/png") for o in outputs for k in o.get("data", {}))


@each
def test_ends_with_what_was_learned_in_computed_numbers(notebook):
    *_, last = load(notebook).cells
    assert any("## What was learned" in c.source for c in load(notebook).cells[-2:])
    (output,) = last.outputs
    findings = [line for line in output.data["text/markdown"].splitlines() if line.startswith("- ")]
    assert len(findings) >= 4 and all(re.search(r"\*\*[^*]*\d[^*]*\*\*", line) for line in findings)
    template = next(n for n in ast.walk(tree_of(last)) if isinstance(n, ast.JoinedStr))
    text = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in template.values)
    assert [told for told in re.findall(r"\*\*(.+?)\*\*", text) if "{}" not in told] == [], "typed, not computed"


@each
def test_imports_research_only_and_holds_no_logic(notebook):
    trees = [tree_of(c) for c in code_of(load(notebook))]
    nodes = [n for tree in trees for n in ast.walk(tree)]
    modules = {n.module for n in nodes if isinstance(n, ast.ImportFrom)}
    assert not [n for n in nodes if isinstance(n, ast.Import)]
    assert {m.partition(".")[0] for m in modules} <= {"research", "IPython"}
    assert [ast.unparse(n) for n in nodes if isinstance(n, LOGIC)] == []


def test_the_shelf_is_whole_and_the_readme_names_it():
    names = [p.stem for p in NOTEBOOKS]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert names and [n for n in names if f"{n}.ipynb" not in readme] == []
    assert set(re.findall(r"notebooks/(\w+)\.ipynb", readme)) == set(names)


def test_a_stale_number_is_noticed():
    kept = load(ROOT / "notebooks" / "09_your_sweep.ipynb")
    now = copy.deepcopy(kept)
    assert differences(kept, now) == []
    output = code_of(now)[-1].outputs[0]
    output.data["text/markdown"] = output.data["text/markdown"].replace("1", "2", 1)
    assert differences(kept, now) == [len(code_of(now)) - 1]


def test_the_template_runs_over_rows_that_it_has_never_seen(execute, tmp_path):
    template = read(ROOT / "tests" / "report" / "row.json")
    traffic = {"dp": {"gradients/all_reduce/backward": 1048576.0}}
    for ranks, arm in enumerate(("one_process", "dp2", "dp2_zero3"), 1):
        hardware = dataclasses.replace(template.hardware, ranks=ranks)
        changes = {"run_id": arm, "arm": arm, "ablation": "quickstart", "hardware": hardware, "comm_bytes": traffic}
        write(dataclasses.replace(template, **changes), tmp_path / "results" / "reference" / "quickstart")
    (tmp_path / "notebooks").mkdir()
    done = execute(load(ROOT / "notebooks" / "09_your_sweep.ipynb"), tmp_path / "notebooks")
    text = json.dumps([said(c) for c in code_of(done)])
    assert "3 rows in" in text and "gradients/all_reduce/backward" in text
