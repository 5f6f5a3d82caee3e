"""How processes become ranks without SLURM: plain python, torchrun, two jobs at once, and a port that is taken."""

import re
import socket
import sys

import pytest
from launching import ROOT, processes, run, torchrun

from spmd_rl import slurm

WORKER = str(ROOT / "tests" / "worker_ranks.py")
LAUNCHER = str(ROOT / "launch" / "torchrun.py")


def ranks_in(output):
    return sorted(line for line in output.splitlines() if line.startswith("rank "))


@pytest.mark.parametrize("start", [run, lambda arguments: torchrun(1, arguments)], ids=["python", "torchrun of one"])
def test_case_70_one_process_is_one_rank(start):
    """By plain python and by a torchrun of one."""
    assert ranks_in(start([WORKER]).succeeded().output) == ["rank 0 of 1, local 0 on here: sum 1"]


def test_case_68_two_jobs_at_once_on_one_machine():
    """Both meet at ports of their own, and have their own two ranks, while the other is there."""
    command = [sys.executable, LAUNCHER, "--standalone", "--nproc-per-node=2", WORKER]
    for finished in processes([command, command], [{"STAY_SECONDS": "4"}] * 2, 60):
        wanted = [f"rank {rank} of 2, local {rank} on here: sum 2" for rank in range(2)]
        assert ranks_in(finished.succeeded().output) == wanted


def task(job, rank):
    """SLURM's variables of one of two tasks on a node."""
    return {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "127.0.0.1",
            "SLURM_STEP_TASKS_PER_NODE": "2"}


@pytest.mark.long
def test_case_68_jobs_whose_ports_collide_do_not_mix():
    """Job 7 and the one that is as many ports further have the same port on the same node: the first runs, the other
    ends with 2 on both ranks, and says which port and job that is."""
    with open(slurm.EPHEMERAL_RANGE) as file:
        other = 7 + int(file.read().split()[0]) - slurm.LOWEST_PORT
    assert slurm.job_port(other) == slurm.job_port(7)
    # The other job's ranks need some seconds for their imports, as those of the first, which are there till then.
    envs = [task(7, 0) | {"STAY_SECONDS": "25"}, task(7, 1) | {"STAY_SECONDS": "25"}, task(other, 0), task(other, 1)]
    late = ["-c", f"import runpy, time; time.sleep(10); runpy.run_path({WORKER!r}, run_name='__main__')"]
    commands = [[sys.executable, *arguments] for arguments in ([WORKER], [WORKER], late, late)]
    *first, second, third = processes(commands, envs, 90)
    for rank, finished in enumerate(first):
        assert ranks_in(finished.succeeded().output) == [f"rank {rank} of 2, local {rank} on here: sum 2"]
    assert (second.returncode, third.returncode) == (2, 2), second.output + third.output
    assert f"127.0.0.1:{slurm.job_port(7)}: the ranks cannot meet there" in second.output
    assert f"the ranks of job step 7.0 meet there, and this is {other}.0; set another MASTER_PORT" in third.output


@pytest.mark.parametrize("by", ["torchrun's variables", "srun's"])
def test_case_68_a_taken_port_is_one_line(by):
    """The port is another's: one line, with the address, and what to set."""
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        env = task(7, 0) if by == "srun's" else {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0",
                                                 "MASTER_ADDR": "127.0.0.1"}
        env |= {"MASTER_PORT": port}
        finished = run([WORKER], env=env, timeout_s=60)
    assert finished.returncode == 2 and "Traceback" not in finished.output
    line, = [line for line in finished.output.splitlines() if line.startswith("refused: ")]
    assert re.search(f"127.0.0.1:{port}: the ranks cannot meet there.*set another MASTER_PORT", line), line
