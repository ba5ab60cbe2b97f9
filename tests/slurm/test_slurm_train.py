"""train.sbatch without Slurm: `srun` and `scontrol` are stand-ins that tell what they were given."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "slurm" / "train.sbatch"
WORDS = ("experiments/configs/tiny.yaml", "train.steps=3", "data.path=a b")
# Two nodes with 4 tasks each, submitted from a host outside the job, out of a shell that torchrun had started.
JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "node[07-08]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "8",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_CPUS_PER_TASK": "3",
    "SLURM_SUBMIT_HOST": "login1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.99",
    "HOSTNAME": "login1",
    "MASTER_ADDR": "127.0.1.1",
    "MASTER_PORT": "29500",
    "RANK": "0",
    "WORLD_SIZE": "1",
}
GPUS = {"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}


@pytest.fixture
def submit(tmp_path):
    """Run the script as in a job with these variables more (None: without)."""
    stand_ins = {
        "srun": 'printf "word %s\\n" "$@"; env; exit "${SRUN_STATUS:-0}"',
        "scontrol": '[ "$*" = "show hostnames $SLURM_JOB_NODELIST" ] && printf "%s\\n" ${HOSTS-node07 node08}',
    }
    for name, body in stand_ins.items():
        Path(tmp_path, name).write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        Path(tmp_path, name).chmod(0o755)
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "env.sh").touch()
    shutil.copy(ROOT / "slurm" / "job.sh", tmp_path / "slurm")

    def run(words=WORDS, folder=tmp_path, script=SCRIPT, **changes):
        path = f"{tmp_path}:{os.environ['PATH']}"
        environment = {k: v for k, v in ({"PATH": path} | JOB | changes).items() if v is not None}
        command = ["bash", str(script), *words]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=20)

    return run


def words_and_environment(job):
    assert job.returncode == 0, job.stderr
    lines = job.stdout.splitlines()
    words = [w.removeprefix("word ") for w in lines if w.startswith("word ")]
    return words, dict(w.split("=", 1) for w in lines if not w.startswith("word ") and "=" in w)


@pytest.mark.parametrize("name", ["train.sbatch", "ablate.sbatch", "job.sh", "env.sh"])
def test_syntax(name):
    subprocess.run(["bash", "-n", str(ROOT / "slurm" / name)], check=True)


def test_the_words_reach_every_rank_as_they_are(submit):
    words, environment = words_and_environment(submit())
    program = words.index("python")
    found = [WORDS[0], "launch.device=cpu", "launch.threads=3", *WORDS[1:]]
    assert words[program:] == ["python", "-m", "experiments.run", *found]
    assert "--kill-on-bad-exit=1" in words[:program] and "--export=ALL" in words[:program]
    assert environment["SRUN_CPUS_PER_TASK"] == "3"


def test_the_meeting_point_is_the_first_allocated_host(submit):
    job = submit()
    _, environment = words_and_environment(job)
    assert environment["MASTER_ADDR"] == "node07"
    assert environment["MASTER_PORT"] == "24711"
    assert job.stdout.splitlines()[0] == "job 4711: 2 x 4 ranks, 0 GPUs per node, meeting at node07:24711"


def test_nothing_is_inherited_from_the_submitting_shell(submit):
    _, environment = words_and_environment(submit())
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} & set(environment)


@pytest.mark.parametrize("first", [1, 11_950, 4_000_000_000])
def test_neighbouring_jobs_have_ports_of_their_own(submit, first):
    def port(job):
        return int(words_and_environment(submit(SLURM_JOB_ID=str(job)))[1]["MASTER_PORT"])

    with ThreadPoolExecutor(4) as pool:
        ports = list(pool.map(port, range(first, first + 100)))
    assert len(set(ports)) == 100
    assert min(ports) > 1023 and max(ports) < 32768


@pytest.mark.parametrize("hosts", ["localhost node08", "127.0.1.1 node08", ""])
def test_a_meeting_point_that_others_cannot_reach_is_refused(submit, hosts):
    job = submit(HOSTS=hosts)
    assert job.returncode == 2 and "cannot reach" in job.stderr


def test_one_node_may_be_called_localhost(submit):
    alone = {"SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "4"}
    _, environment = words_and_environment(submit(HOSTS="localhost", **alone))
    assert environment["MASTER_ADDR"] == "localhost"


def test_one_task_per_gpu(submit):
    job = submit(**GPUS)
    words, environment = words_and_environment(job)
    assert "launch.device=cuda" in words and environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert "2 x 4 ranks, 4 GPUs per node" in job.stdout


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (GPUS | {"SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)"}, "2 tasks and 4 GPUs per node"),
        (GPUS | {"SLURM_GPUS_PER_TASK": "1"}, "give --gpus-per-node"),
        ({"SLURM_GPUS_ON_NODE": "1"}, "4 tasks and 1 GPUs per node"),
        ({"SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "2,1"}, "3 tasks are not the same number on each of 2 nodes"),
        ({"SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "3,1"}, "4 tasks are not the same number on each of 2 nodes"),
        # what Slurm wrote for --ntasks=3 --ntasks-per-node=2
        ({"SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "2(x2)"}, "3 tasks are not the same number"),
        ({"SLURM_JOB_ID": None}, "runs inside a job: sbatch slurm/train.sbatch CONFIG"),
    ],
)
def test_an_allocation_that_does_not_fit_is_refused(submit, changes, text):
    job = submit(**changes)
    assert (job.returncode, job.stdout) == (2, "")
    assert text in job.stderr


@pytest.mark.parametrize("words", [(), ("train.steps=3",)])
def test_no_config_is_refused(submit, words):
    job = submit(words)
    assert job.returncode == 2 and "no CONFIG" in job.stderr


def test_only_from_the_root_of_the_repository(submit):
    job = submit(folder=ROOT / "slurm")
    assert job.returncode == 2 and "submit from the root" in job.stderr


@pytest.mark.parametrize("status", [1, 2, 137])
def test_the_job_ends_as_the_ranks_ended(submit, status):
    assert submit(SRUN_STATUS=str(status)).returncode == status


ARRAY = ROOT / "slurm" / "ablate.sbatch"
ELEMENT = {"SLURM_ARRAY_JOB_ID": "4700", "SLURM_ARRAY_TASK_ID": "1"}
RUNS = ("srun", "results/attempts/a b", "results/attempts/axes-two (1)")


def element(submit, tmp_path, words=RUNS, **changes):
    """`python` is a stand-in too: it stands for experiments.arm."""
    (tmp_path / "python").write_text('#!/bin/bash\nprintf "word %s\\n" "$@"; env\n')
    (tmp_path / "python").chmod(0o755)
    return submit(words, script=ARRAY, **(ELEMENT | changes))


def test_an_element_keeps_the_run_of_its_index(submit, tmp_path):
    words, environment = words_and_environment(element(submit, tmp_path))
    assert words[:4] == ["-m", "experiments.arm", RUNS[2], "srun"]
    assert words[-4:] == ["python", "-m", "experiments.run", f"{RUNS[2]}/attempt.json"]
    assert environment["MASTER_ADDR"] == "node07" and environment["MASTER_PORT"] == "24711"
    assert environment["CUDA_VISIBLE_DEVICES"] == ""  # what was not asked for is not taken
    words, environment = words_and_environment(element(submit, tmp_path, **GPUS))
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


@pytest.mark.parametrize(
    ("words", "changes", "text"),
    [
        (RUNS, {"SLURM_ARRAY_TASK_ID": None}, "is for an array: python -m experiments.ablate FILE --submit"),
        (RUNS, {"SLURM_ARRAY_TASK_ID": "2"}, "no FOLDER for index 2"),
        (("mpirun", *RUNS[1:]), {}, "launcher 'mpirun' is not known; give srun or torchrun"),
        (RUNS, {"SLURM_GPUS_ON_NODE": "1"}, "4 tasks and 1 GPUs per node"),
    ],
)
def test_an_element_that_cannot_be_is_refused(submit, tmp_path, words, changes, text):
    job = element(submit, tmp_path, words, **changes)
    assert job.returncode == 2 and text in job.stderr


def test_torchrun_starts_the_ranks_of_each_node(submit, tmp_path):
    words, environment = words_and_environment(submit(LAUNCHER="torchrun"))
    program = words.index("python")
    assert {"--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"} <= set(words[:program])
    assert words[program : program + 5] == ["python", "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=4"]
    assert "--rdzv-endpoint=node07:24711" in words and any("SIGUSR1" in w for w in words)
    found = [WORDS[0], "launch.device=cpu", "launch.threads=3", *WORDS[1:]]
    assert words[-len(found) - 2 :] == ["-m", "experiments.run", *found]
    assert environment["SRUN_CPUS_PER_TASK"] == "12"  # those of the four ranks that it starts
    in_array, _ = words_and_environment(element(submit, tmp_path, ("torchrun", *RUNS[1:])))
    assert "torch.distributed.run" in in_array and in_array[-1] == f"{RUNS[2]}/attempt.json"


def test_env_serves_any_shell(submit):
    """sbatch --wrap runs /bin/sh."""
    command = ["sh", "-euc", ". slurm/env.sh; echo $OMP_NUM_THREADS"]
    environment = {"PATH": os.environ["PATH"]}
    for threads in ("", "3"):
        done = subprocess.run(
            command, cwd=ROOT, env=environment | {"SLURM_CPUS_PER_TASK": threads}, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{threads or 1}\n", "")
    assert words_and_environment(submit(folder=ROOT))[1]["OMP_NUM_THREADS"] == "3"
