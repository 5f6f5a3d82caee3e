"""SLURM's variables as a launcher's, node lists, and ports below the ephemeral range."""

import socket

import pytest

from spmd_rl import slurm
from spmd_rl.config import ConfigError
from spmd_rl.mesh import Ranks
from spmd_rl.slurm import first_host, job_port, rank_variables

STEP = {"SLURM_JOB_ID": "1234", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "7", "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}


@pytest.mark.parametrize("nodes, first", [
    ("n1", "n1"), ("n[1-2]", "n1"), ("n[1-2,7]", "n1"), ("gpu-[003-009,12]", "gpu-003"),
    ("gpu-[003-9]-ib,x1", "gpu-003-ib"), ("a1,b[2-3]", "a1"), ("rack1-node[07]", "rack1-node07")])
def test_the_first_host_of_a_node_list(nodes, first):
    """Ranges, lists, leading zeros and suffixes."""
    assert first_host(nodes) == first


def test_a_task_has_a_launchers_variables():
    """Rank, world, local rank and the tasks of this node; the ranks meet on the first one."""
    found = rank_variables(STEP)
    assert {name: found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")} == {
        "RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    assert rank_variables(STEP | {"SLURM_NODEID": "3"})["LOCAL_WORLD_SIZE"] == "1"
    own = rank_variables(STEP | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "999"})
    assert "MASTER_ADDR" not in own and "MASTER_PORT" not in own


def test_case_68_ports_are_below_the_ephemeral_range():
    """For any job id and any range: never a port that the system hands to a connection, never a reserved one."""
    for start in (32768, 49152, 1025, 10000, 11000):
        for job in (1, 999, 123456, 2**31):
            assert 1024 <= job_port(job, 0, start) < start
    with open(slurm.EPHEMERAL_RANGE) as file:
        assert job_port(77) < int(file.read().split()[0])


def test_case_68_neighbouring_jobs_and_steps_have_ports_of_their_own():
    """Twenty thousand jobs in a row: all ports differ, also for three steps each of neighbours; the same job gets the
    same."""
    ports = [job_port(job, 0, 32768) for job in range(5000, 25000)]
    assert len(set(ports)) == len(ports)
    ports = [job_port(job, step, 32768) for job in range(5000, 5100) for step in range(3)]
    assert len(set(ports)) == len(ports)
    assert job_port(5000, 1) == job_port(5000, 1)


def test_a_host_that_does_not_resolve_is_an_error_without_scontrol(monkeypatch):
    """No silent guess of an address."""
    monkeypatch.setattr(slurm.shutil, "which", lambda name: None)
    assert slurm.address("localhost") == "localhost"
    with pytest.raises(socket.gaierror):
        slurm.address("no-such-host.invalid")


@pytest.fixture
def in_step(monkeypatch):
    """This process as a task of the step, without a launcher; what becomes of the environment is undone."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
                 "TORCHELASTIC_RUN_ID", "GROUP_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_case_70_tasks_of_srun_are_ranks(in_step):
    """Without torchrun; the ranks meet at the first task of the first node, which is not this one."""
    assert Ranks.from_environment() == Ranks(5, 7, 1, hosts_store=False)


def test_the_ranks_meet_on_the_first_node_whoever_is_rank_0(in_step):
    """srun may give rank 0 to another node (--distribution=arbitrary): the store is where MASTER_ADDR says, unless the
    user has set that, which is rank 0's by torch's convention."""
    in_step.setenv("SLURM_NODEID", "0")
    in_step.setenv("SLURM_LOCALID", "0")
    assert Ranks.from_environment() == Ranks(5, 7, 0, hosts_store=True)
    assert Ranks.from_environment() == Ranks(5, 7, 0, hosts_store=True)  # now with the variables that the first has set
    in_step.setenv("MASTER_ADDR", "10.0.0.9")
    assert Ranks.from_environment() == Ranks(5, 7, 0)


@pytest.mark.parametrize("absent", slurm.NEEDED)
def test_case_70_missing_variables_are_named(in_step, absent):
    """A container that passes only some of them on: no rank guesses the rest."""
    in_step.delenv(absent)
    with pytest.raises(ConfigError, match=f"7 tasks, but {absent} are not set.*container"):
        Ranks.from_environment()


def test_a_first_node_without_an_address_is_refused(in_step):
    """With what to set, not a traceback of a socket."""
    in_step.setattr(slurm.shutil, "which", lambda name: None)
    in_step.setenv("SLURM_STEP_NODELIST", "no-such-host[1-2].invalid")
    with pytest.raises(ConfigError, match="no-such-host.*set MASTER_ADDR"):
        Ranks.from_environment()


def test_case_70_one_task_is_one_rank(in_step):
    """Also inside of a job: an interactive shell of srun --pty."""
    in_step.setenv("SLURM_STEP_NUM_TASKS", "1")
    in_step.setenv("SLURM_PROCID", "0")
    assert Ranks.from_environment() == Ranks(0, 1, 0)


@pytest.mark.parametrize("stale, words", [({"RANK": "0"}, "RANK is 0 but SLURM_PROCID is 5"),
                                          ({"WORLD_SIZE": "9"}, "WORLD_SIZE is 9 but SLURM_STEP_NUM_TASKS is 7")])
def test_case_70_contradictions_are_refused(in_step, stale, words):
    """Variables left from another job would win over SLURM's."""
    variables = {"RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"} | stale
    for name, value in variables.items():
        in_step.setenv(name, value)
    with pytest.raises(ConfigError, match=words):
        Ranks.from_environment()


@pytest.mark.parametrize("nodes, refused", [("7", False), ("4", True)])
def test_case_70_a_torchrun_in_each_task_is_refused(in_step, nodes, refused):
    """One torchrun a task is right where each task is a node of it; otherwise there are tasks x ranks processes."""
    variables = {"RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h",
                 "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "GROUP_WORLD_SIZE": nodes}
    for name, value in variables.items():
        in_step.setenv(name, value)
    if refused:
        with pytest.raises(ConfigError, match="7 tasks, and each a torchrun for 4 nodes, 7 x 2 processes"):
            Ranks.from_environment()
    else:
        assert Ranks.from_environment() == Ranks(5, 7, 1)
