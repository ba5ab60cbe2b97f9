"""What torchrun's variables say, and what is wrong with them. Those of Slurm: tests/slurm."""

import pytest

from research.launch.environment import hosts, joined
from research.launch.process import Place

MEETING = {"MASTER_ADDR": "node07", "MASTER_PORT": "29501"}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    **MEETING,
}
SRUN = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_JOB_ID": "9501",
}


@pytest.mark.parametrize("environment", [TORCHRUN, SRUN], ids=["torchrun", "srun"])
def test_a_complete_environment_is_a_place(environment: dict[str, str]) -> None:
    where = joined(environment)
    assert where is not None and where.place == Place(5, 8, 1, 4) and where.place.nodes == 2
    assert where.init_method == "tcp://node07:29501"


def test_where_srun_meets_may_be_said_and_is_never_shared() -> None:
    said = joined(SRUN | {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "1234"})
    assert said is not None and said.init_method == "tcp://elsewhere:1234"
    neighbours = [SRUN | {"SLURM_JOB_ID": str(j), "SLURM_STEP_ID": str(s)} for j in range(9000, 9100) for s in range(5)]
    assert len({where.init_method for where in map(joined, neighbours) if where}) == 500


@pytest.mark.parametrize(
    ("nodelist", "want"),
    [
        ("a", "a"),
        ("a1,b2", "a1 b2"),
        ("a[01-03,7]", "a01 a02 a03 a7"),
        ("a[01-03,7],b,c[9-11]-ib", "a01 a02 a03 a7 b c9-ib c10-ib c11-ib"),
        ("rack[1-2]node[08-09]", "rack1node08 rack1node09 rack2node08 rack2node09"),
        ("gpu-0-[098-101]", "gpu-0-098 gpu-0-099 gpu-0-100 gpu-0-101"),
    ],
)
def test_node_lists(nodelist: str, want: str) -> None:
    assert hosts(nodelist) == want.split()


@pytest.mark.parametrize("nodelist", ["", "a[", "a[]", "a[1-]", "a[x]", "a[1,,2]", ","])
def test_what_is_no_node_list(nodelist: str) -> None:
    with pytest.raises(ValueError, match="is no list of nodes"):
        hosts(nodelist)


@pytest.mark.parametrize(
    "environment",
    [{}, MEETING, {"LOCAL_RANK": "0"}, {"SLURM_PROCID": "0"}],
)
def test_without_a_launcher_there_is_no_place(environment: dict[str, str]) -> None:
    assert joined(environment) is None


@pytest.mark.parametrize("name", [*TORCHRUN, "MASTER_ADDR MASTER_PORT", "WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"])
def test_what_torchrun_forgot_is_named(name: str) -> None:
    """One variable of two is no reason to start a world of one's own on every rank."""
    names = name.split()
    with pytest.raises(ValueError, match=f"but not {', '.join(names)}$"):
        joined({k: v for k, v in TORCHRUN.items() if k not in names})


@pytest.mark.parametrize("name", [n for n in SRUN if n != "SLURM_STEP_ID"])
def test_what_srun_forgot_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"but not {name}$"):
        joined({k: v for k, v in SRUN.items() if k != name})


@pytest.mark.parametrize("name", ["RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID"])
@pytest.mark.parametrize("value", ["", "one", "1.5"])
def test_what_is_no_number_is_named(name: str, value: str) -> None:
    environment = TORCHRUN if name in TORCHRUN else SRUN
    with pytest.raises(ValueError, match=rf"{name}.* these are no numbers"):
        joined(environment | {name: value})


@pytest.mark.parametrize(
    ("tasks", "node", "local_world", "nodes"),
    [
        ("8", "0", 8, 1),
        ("4(x2)", "1", 4, 2),
        ("1(x8)", "7", 1, 8),
        ("3(x2),2", "0", 3, 3),
        ("3(x2),2", "1", 3, 3),
        ("3(x2),2", "2", 2, 3),
        ("6,2", "1", 2, 2),
        ("3,5", "0", 3, 2),
        ("3,5", "1", 5, 2),
    ],
)
def test_tasks_per_node_in_the_form_of_slurm(tasks: str, node: str, local_world: int, nodes: int) -> None:
    where = joined(SRUN | {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node})
    assert where is not None and (where.place.local_world, where.place.nodes) == (local_world, nodes)


@pytest.mark.parametrize("node", [None, "", "2", "-1", "x"])
def test_which_of_uneven_nodes_this_is_must_be_told(node: str | None) -> None:
    said = {} if node is None else {"SLURM_NODEID": node}
    with pytest.raises(ValueError, match=r"SLURM_STEP_TASKS_PER_NODE=3,5, and SLURM_NODEID=.* does not tell which of"):
        joined(SRUN | said | {"SLURM_STEP_TASKS_PER_NODE": "3,5"})


@pytest.mark.parametrize("host", ["", "localhost", "127.0.0.1", "127.0.1.1", "::1"])
def test_other_nodes_must_reach_where_ranks_meet(host: str) -> None:
    """Nodes that torchrun is told of may be several on one machine."""
    here = {"MASTER_ADDR": host}
    with pytest.raises(ValueError, match=f"MASTER_ADDR={host}, which other nodes cannot reach"):
        joined(SRUN | here)
    assert joined(SRUN | {"SLURM_STEP_TASKS_PER_NODE": "8"} | here) is not None
    assert joined(TORCHRUN | here) is not None
