"""srun's tasks as ranks, on two nodes, without any engine."""

import subprocess
import sys

import pytest
from launching import ROOT

WORKER = str(ROOT / "tests" / "worker_ranks.py")


def srun(cluster, *arguments, env=None):
    return subprocess.run(["srun", *arguments], env=cluster.env | {"PYTHONPATH": str(ROOT)} | (env or {}), text=True,
                          capture_output=True, timeout=120, check=False, cwd=ROOT)


@pytest.mark.parametrize("tasks_per_node", [pytest.param(1, marks=pytest.mark.long), 2])
def test_case_70_tasks_are_ranks(cluster, tasks_per_node):
    """Each of two nodes with one or two tasks: ranks in order over the nodes, one group of all."""
    count = 2 * tasks_per_node
    done = srun(cluster, "-N", "2", "-n", str(count), f"--ntasks-per-node={tasks_per_node}", sys.executable, WORKER)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"rank {rank} of {count}, local {rank % tasks_per_node} on n{1 + rank // tasks_per_node}: sum {count}"
        for rank in range(count)]


@pytest.mark.long
def test_rank_0_may_be_on_another_node_than_the_first(cluster, tmp_path):
    """srun's arbitrary distribution gives rank 0 to the second node: the ranks meet on the first one all the same."""
    (tmp_path / "hosts").write_text("n2\nn1\n")
    done = srun(cluster, "-N", "2", "-n", "2", "--distribution=arbitrary", sys.executable, WORKER,
                env={"SLURM_HOSTFILE": str(tmp_path / "hosts")})
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2, local 0 on n2: sum 2",
                                                "rank 1 of 2, local 0 on n1: sum 2"]


@pytest.mark.long
def test_case_70_a_torchrun_in_each_of_several_tasks_is_refused(cluster):
    """Two tasks on a node with a torchrun of two ranks each would be 2 x 2 processes: the numbers and the fix."""
    done = srun(cluster, "-N", "1", "-n", "2", "--overcommit", sys.executable, "-m", "torch.distributed.run",
                "--standalone", "--nproc_per_node", "2", WORKER)
    assert done.returncode != 0
    assert "refused: srun started 2 tasks, and each a torchrun for 1 nodes, 2 x 2 processes" in done.stdout
    assert "--ntasks-per-node=1" in done.stdout


@pytest.mark.long
def test_case_70_variables_of_an_outer_job_are_refused(cluster):
    """RANK and WORLD_SIZE that are left from elsewhere contradict SLURM's."""
    stale = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = srun(cluster, "-N", "2", "-n", "2", sys.executable, WORKER, env=stale)
    assert done.returncode != 0
    assert "refused: WORLD_SIZE is 1 but SLURM_STEP_NUM_TASKS is 2" in done.stdout
