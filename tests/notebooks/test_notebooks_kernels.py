"""Ranks from a notebook: by the command line's own launcher, the same each time, nothing left behind."""

import copy
import time

import nbformat
import psutil
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

from research.record import load
from tests.notebooks.conftest import NOTEBOOKS, ROOT

WORDS = ["experiments/configs/tiny.yaml", "dp.degree=2", "train.warmup_steps=1", "data.path=[LICENSE]"]


@pytest.fixture
def kernel(kernel_environment):
    manager, client = start_new_kernel(kernel_name="python3", env=kernel_environment, cwd=str(ROOT / "notebooks"))
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def processes(manager):
    """What the kernel has started and what these have."""
    return psutil.Process(manager.provisioner.pid).children(recursive=True)


def gone(manager, limit_s=20.0):
    end = time.monotonic() + limit_s
    while (left := processes(manager)) and time.monotonic() < end:
        time.sleep(0.1)
    return not left


@pytest.mark.timeout(200)
def test_ranks_run_twice_in_one_kernel_also_after_an_interrupt(kernel, tmp_path):
    manager, client = kernel

    def cell(name, steps):
        words = [*WORDS, f"train.steps={steps}", f"record.folder={tmp_path / name}"]
        return f"from research.launch.apart import entry_point\nentry_point('run', *{words!r})"

    begun = client.execute(cell("endless", 100000))
    end = time.monotonic() + 60
    while len(processes(manager)) < 3 and time.monotonic() < end:  # the entry point and two ranks
        time.sleep(0.1)
    assert len(processes(manager)) >= 3
    manager.interrupt_kernel()
    while (reply := client.get_shell_msg(timeout=60))["parent_header"]["msg_id"] != begun:
        pass  # that the kernel is there
    assert reply["content"]["ename"] == "KeyboardInterrupt"
    assert gone(manager)

    for name in ("first", "second"):
        assert client.execute_interactive(cell(name, 2), timeout=80, output_hook=id)["content"]["status"] == "ok"
        assert gone(manager, 5.0)
    (first,), (second,) = (load(tmp_path / name) for name in ("first", "second"))
    assert first.hardware.ranks == 2 and first.losses == second.losses and first.grad_norms == second.grad_norms


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_every_notebook_runs_twice_in_one_kernel(notebook, kernel_environment):
    once = nbformat.read(notebook, as_version=4)
    again = copy.deepcopy(once)
    client = NotebookClient(once, timeout=120, resources={"metadata": {"path": str(ROOT / "notebooks")}})
    with client.setup_kernel(env=kernel_environment):
        for nb in (once, again):
            for i, cell in enumerate(nb.cells):
                client.execute_cell(cell, i, store_history=False)
        assert gone(client.km, 5.0)
    first, second = ([o.get("data", {}).get("text/markdown") for o in nb.cells[-1].outputs] for nb in (once, again))
    assert first == second
