"""Which process has been given a rank, by the variables that Slurm and torchrun set."""

import pytest

from research.launch.environment import joined
from research.launch.process import Place

MEETING = {"MASTER_ADDR": "node07", "MASTER_PORT": "24711"}
# A batch script runs as "rank 0" of 8, outside any step; MASTER_ADDR is already there for srun.
BATCH = MEETING | {
    "SLURM_JOB_ID": "4711",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}
# salloc with an interactive step, and `srun --pty`: a step of one task, whatever the allocation has.
SHELL = BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
STEP = BATCH | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
TORCHRUN = MEETING | {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"}


@pytest.mark.parametrize("environment", [{}, MEETING, BATCH, SHELL])
def test_nobody_to_join(environment):
    assert joined(environment) is None


def test_srun_gives_each_task_its_own_rank_and_device():
    tasks = [joined(STEP | {"SLURM_PROCID": str(r), "SLURM_LOCALID": str(r % 4)}) for r in range(8)]
    assert [t.place for t in tasks] == [Place(r, 8, r % 4, 4) for r in range(8)]
    assert {t.place.nodes for t in tasks} == {2}
    assert {t.init_method for t in tasks} == {"tcp://node07:24711"}


@pytest.mark.parametrize("around", [{}, BATCH, SHELL, STEP])
def test_torchrun_counts_also_inside_a_job(around):
    assert joined(around | TORCHRUN).place == Place(5, 6, 2, 3)


def test_what_the_launcher_forgot_is_named():
    with pytest.raises(ValueError, match=r"SLURM_PROCID, but not SLURM_STEP_NODELIST$"):
        joined({k: v for k, v in STEP.items() if k not in MEETING})
