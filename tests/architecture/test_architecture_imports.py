"""Imports point one way, models know nothing of ranks, and nobody reads the environment behind the user's back."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Trees = Mapping[str, ast.Module]

# Module or package -> what it may import of this project. The longest name that fits a module counts.
MAY_IMPORT = {
    "research.presets": "",
    "research.problems": "",
    "research.config": "problems",
    "research.settings": "config problems presets",
    "research.ledger": "",
    "research.mesh": "config ledger",
    "research.comm": "config ledger mesh",
    "research.files": "",
    "research.weights": "config problems settings files models weights",
    "research.record": "config problems settings files",
    "research.models": "config models",
    "research.data": "config problems files data models.batch",
    "research.parallel": "config problems ledger mesh comm models.batch models.seams models.kernels models.products "
    "models.partial_attention models.recompute train.action",  # and its own folder
    "research.parallel.axis": "built config problems mesh models.batch models.params models.products models.seams "
    "parallel train.action train.storage",
    # The one axis that keeps training state: its shards are a kind of storage.
    "research.parallel.dp": "built config problems ledger mesh comm models.batch models.products models.recipes "
    "models.seams parallel.dp train.storage",
    # It weighs the parts of a model.
    "research.parallel.pp.cut": "config models.decoder models.flops",
    "research.built": "mesh models",
    "research.build": "built config mesh comm models parallel.axis",
    # It counts the parameters of a model in its layout.
    "research.parallel.dp.cost": "built config ledger mesh models parallel.axis parallel.dp.shards",
    "research.launch": "config problems ledger launch",
    "research.ablation": "config problems settings files",
    "research.attempts": "config problems settings files record",
    "research.sweep": "ablation attempts config mesh problems record sweep",
    "research.train.action": "",
    "research.train": "attempts config problems settings files ledger mesh comm record data models parallel.axis built "
    "build launch train",
    "research.generate": "build built comm config problems data generate launch ledger mesh models parallel.axis "
    "train.action train.handover train.checkpoint weights",
    "research.report": "ablation attempts config settings files record report",
    "research.report.dry": "config data launch.process mesh train.loop train.memory train.optim train.run",
    "research.report.topology": "launch.process mesh report.figures",
    "research.report.trace": "build built config data launch.process mesh models parallel.axis train.loop train.run",
    "research.report.routes": "config mesh models parallel.axis report.trace",
    "research.report.schedules": "parallel.pp",
    "research.report.pipelines": "parallel.pp record report",
    "research.report.differences": "build config launch.process mesh models parallel record report.formulas "
    "report.tables",
    "research.report.tokens": "parallel.cp report.figures",
    "research.bench": "bench build comm config files launch mesh models parallel.axis settings train",
    "research.bench.pipeline": "comm config data.tokens launch ledger mesh models parallel.pp train",
    "research.reproduce": "parallel.pp reproduce",
    # It counts what the storage that trains keeps and sends.
    "research.reproduce.zero": "build config launch.process mesh models parallel.axis reproduce train",
    "experiments": "research experiments.command experiments.tables",
}
ALONE = ("research", "research.parallel")  # packages without code
DISTRIBUTED = ("research.mesh", "research.comm", "research.launch", "research.train.checkpoint")
# What we are compared with.
PEERS = tuple(f"research.bench.torch_{axis}" for axis in ("context", "data", "expert", "pipeline", "tensor"))
ENVIRONMENT = ("research.launch.environment", "experiments")
TOPOLOGY = {"rank", "ranks", "group", "groups", "degree", "degrees", "axis", "axes", "mesh", "world"}
TOPOLOGY |= {"tp", "cp", "ep", "pp", "dp", "etp", "edp"}
OF_EXPERTS = {"expert_groups", "top_groups", "group_best"}  # a router's groups (DeepSeek-V2), none of processes


def within(name: str, packages: Iterable[str]) -> bool:
    return any(name == p or name.startswith(p + ".") for p in packages)


def imports(tree: ast.Module, trees: Trees) -> Iterator[tuple[str, int]]:
    """Full names of the modules that a file imports, anywhere in it, and the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"line {node.lineno}: a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield (full if full in trees or full == "torch.distributed" else node.module), node.lineno
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield "torch.distributed", node.lineno


def own(trees: Trees) -> Iterator[tuple[str, str, int]]:
    """Importer, imported and line, of all imports inside the project."""
    for name, tree in trees.items():
        for target, line in imports(tree, trees):
            if within(target, ("research", "experiments", "notebooks", "tests")):
                yield name, target, line


def allowed(importer: str) -> list[str]:
    row = max((r for r in MAY_IMPORT if within(importer, [r])), key=len)
    names = MAY_IMPORT[row].split()
    full = [n if within(n, ["research", "experiments"]) else f"research.{n}" for n in names]
    if row == "research.parallel":
        full.append(".".join(importer.split(".")[:3]))
    return full


def test_every_module_has_a_place(trees: Trees) -> None:
    assert [name for name in trees if name not in ALONE and not within(name, MAY_IMPORT)] == []
    assert [name for name in ALONE if not all(isinstance(s, ast.Expr) for s in trees[name].body)] == []


def test_every_row_of_the_table_is_a_module(trees: Trees) -> None:
    named = {f"research.{n}" for text in MAY_IMPORT.values() for n in text.split() if "experiments" not in n}
    assert [n for n in {*MAY_IMPORT, *named - {"research.research"}} if n not in trees] == []


def test_imports_point_one_way(trees: Trees) -> None:
    wrong = [f"{a} imports {b}, line {line}" for a, b, line in own(trees) if not within(b, allowed(a))]
    assert wrong == []


def test_no_import_goes_round(trees: Trees) -> None:
    graph: dict[str, set[str]] = {name: set() for name in trees}
    for importer, imported, _ in own(trees):
        graph[importer].add(imported)
        parents = imported.split(".")
        packages = {".".join(parents[:i]) for i in range(1, len(parents))}  # run before the module itself
        graph[importer] |= {p for p in packages if not within(importer, [p])}
    list(graphlib.TopologicalSorter(graph).static_order())  # a CycleError names the circle


def test_models_need_torch_and_einops_only(trees: Trees) -> None:
    wrong = []
    for name in (n for n in trees if within(n, ["research.models"])):
        for target, line in imports(trees[name], trees):
            root = target.partition(".")[0]
            flash = name == "research.models.kernels" and root == "flash_attn"
            if not (root in ("torch", "einops", "research") or root in sys.stdlib_module_names or flash):
                wrong.append(f"{name} imports {target}, line {line}")
    assert wrong == []


def test_few_modules_know_process_groups(trees: Trees) -> None:
    wrong = [
        f"{name} imports {target}, line {line}"
        for name, tree in trees.items()
        for target, line in imports(tree, trees)
        if within(target, ["torch.distributed"]) and not within(name, DISTRIBUTED + PEERS)
    ]
    assert wrong == []


def identifiers(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """All names in the code of a file, and strings that are nothing but a name; no comments, no docstrings."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            if isinstance(text := getattr(node, field, None), str):
                yield text, line
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value, line


def test_models_name_no_rank_group_degree_or_axis(trees: Trees) -> None:
    wrong = [
        f"{name} names {text}, line {line}"
        for name in trees
        if within(name, ["research.models"])
        for text, line in identifiers(trees[name])
        if text not in OF_EXPERTS and TOPOLOGY & set(text.lower().replace(".", "_").split("_"))
    ]
    assert wrong == []


def environment_reads(tree: ast.Module) -> Iterator[int]:
    names = ("environ", "environb", "getenv", "getenvb")
    for node in ast.walk(tree):
        if (isinstance(node, ast.Attribute) and node.attr in names) or (
            isinstance(node, ast.ImportFrom) and node.module == "os" and any(a.name in names for a in node.names)
        ):
            yield node.lineno


def test_the_environment_is_read_in_one_place(trees: Trees) -> None:
    """Default arguments are reads as well: they stand in the tree like everything else."""
    reads = {name: list(environment_reads(tree)) for name, tree in trees.items()}
    assert {name for name, lines in reads.items() if lines and not within(name, ENVIRONMENT)} == set()
    assert reads["research.launch.environment"]


def test_no_import_is_hidden(trees: Trees) -> None:
    """No sys.path, no import by name: the tests above would not see it."""
    hidden = [
        f"{name}: {ast.unparse(node)}, line {node.lineno}"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.path", "importlib.import_module"))
        or (isinstance(node, ast.Name) and node.id in ("__import__", "exec", "eval"))
    ]
    assert hidden == []


ALONE_SCRIPT = """
import importlib, os, sys, traceback
others, modules = (text.split() for text in sys.argv[1:])
for name in others:
    importlib.import_module(name)  # once for all
for name in modules:
    assert not [m for m in sys.modules if m.partition(".")[0] in ("research", "experiments")]
    pid = os.fork()
    if pid == 0:
        try:
            importlib.import_module(name)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        print(name)
"""


@pytest.mark.timeout(300)
def test_every_module_imports_alone(trees: Trees) -> None:
    everything = {target.partition(".")[0] for tree in trees.values() for target, _ in imports(tree, trees)}
    others = sorted(everything - sys.stdlib_module_names - {"research", "experiments", "flash_attn"})
    command = [sys.executable, "-c", ALONE_SCRIPT, " ".join(others), " ".join(trees)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
