"""A real Slurm for tests: controller and two nodes, n1 and n2, as processes of this machine that leave nothing behind.

All daemons live in namespaces of their own: hosts file, host names and process ids. When the first of them ends, the
kernel ends all the others and every job with them. Ports are free ones, so clusters do not meet each other; the client
commands outside find the daemons by 127.0.0.1.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
NODES = ("n1", "n2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "unshare")
UP_S = 30.0
FINAL = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "OUT_OF_MEMORY", "NODE_FAIL")

CONFIG = """
ClusterName=tests
SlurmctldHost=head(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=2
MinJobAge=3600
MailProg=/bin/true
NodeName=n1 NodeAddr=127.0.0.1 Port={ports[1]} CPUs=16 RealMemory=100000 State=UNKNOWN
NodeName=n2 NodeAddr=127.0.0.1 Port={ports[2]} CPUs=16 RealMemory=100000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES PriorityTier=2 State=UP
PartitionName=spare Nodes=ALL PriorityTier=1 GraceTime=20 State=UP
"""

# Started in the namespaces, as their first process.
DAEMONS = """
set -eu
cd {folder}
mount --bind hosts /etc/hosts
hostname head
munged --foreground --force --key-file={folder}/munge.key --socket={folder}/munge.socket \
    --pid-file={folder}/munge.pid --seed-file={folder}/munge.seed --log-file={folder}/munge.log &
until [ -S munge.socket ]; do sleep 0.05; done
for node in n1 n2; do
    mkdir spool.$node
    unshare --uts sh -c "hostname $node; exec slurmd -D -N $node" &
done
exec slurmctld -D -i
"""


def why_not() -> str:
    """What keeps Slurm from running here; "" where nothing does."""
    if missing := [p for p in PROGRAMS if shutil.which(p) is None]:
        return f"Slurm is not installed: no {', '.join(missing)} (apt-get install slurm-wlm munge)"
    if os.geteuid() != 0:
        return "Slurm's daemons need root here"
    if subprocess.run(["unshare", "--mount", "--pid", "--uts", "--fork", "true"], capture_output=True).returncode:
        return "namespaces cannot be made here"
    return ""


class Cluster:
    """`with Cluster() as cluster`: up and idle inside the block, gone after it."""

    def __enter__(self) -> "Cluster":
        self.folder = Path(tempfile.mkdtemp(prefix="slurm."))
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if hasattr(self, "_daemons"):
            self._daemons.send_signal(signal.SIGKILL)  # unshare takes the namespace along
            self._daemons.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        sockets = [socket.socket() for _ in range(1 + len(NODES))]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in sockets]
        for each in sockets:
            each.close()
        (self.folder / "state").mkdir()
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost head n1 n2 {socket.gethostname()}\n")
        (self.folder / "slurm.conf").write_text(CONFIG.format(folder=self.folder, ports=ports))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(64))
        namespaces = ["unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]
        with (self.folder / "daemons.log").open("wb") as log:
            command = [*namespaces, "bash", "-c", DAEMONS.format(folder=self.folder)]
            self._daemons = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
        self.until(lambda: self._idle() == len(NODES), UP_S, self._logs)

    @property
    def environment(self) -> dict[str, str]:
        """For client commands, and so for jobs: this Python first, and nothing of a job that this process runs in."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return clean | {"PATH": path, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def _idle(self) -> int:
        told = self.run("sinfo", "--noheader", "--partition=main", "--states=idle", "--format=%D", check=False)
        return sum(int(n) for n in told.split() if n.isdigit())

    def _logs(self) -> str:
        return "\n".join(f"{p.name}:\n{p.read_text(errors='replace')[-2000:]}" for p in self.folder.glob("*.log"))

    def run(self, *command: str, check: bool = True, **more: str) -> str:
        """What a client command prints; `more` are environment variables."""
        environment = self.environment | more
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, cwd=ROOT)
        assert not check or done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def field(self, job: str, name: str) -> str:
        """Of `scontrol show job`; "" where it has none."""
        words = self.run("scontrol", "show", "job", "--oneliner", job).split()
        return next((w.partition("=")[2] for w in words if w.startswith(f"{name}=")), "")

    def ended(self, job: str, limit_s: float) -> str:
        """State of a job or an element of an array, once it is a final one."""
        self.until(
            lambda: self.field(job, "JobState") in FINAL, limit_s, lambda: f"job {job}: {self.field(job, 'JobState')}"
        )
        return self.field(job, "JobState")

    @staticmethod
    def until(true, limit_s: float, told) -> None:
        end = time.monotonic() + limit_s
        while not true():
            assert time.monotonic() < end, f"not within {limit_s} s: {told()}"
            time.sleep(0.2)
