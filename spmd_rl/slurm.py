"""What SLURM tells a task, as the variables that torchrun would have set: for srun with one task a rank."""

import re
import shutil
import socket
import subprocess
from collections.abc import Mapping

EPHEMERAL_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"
LOWEST_PORT = 10000
NEEDED = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST",
          "SLURM_JOB_ID", "SLURM_STEP_ID")


def num_tasks(environment: Mapping[str, str]) -> int:
    """Tasks of the job step that this process is a task of; 1 outside of one."""
    return int(environment.get("SLURM_STEP_NUM_TASKS", "1"))


def missing(environment: Mapping[str, str]) -> list[str]:
    """Variables of a task that are not there."""
    return [name for name in NEEDED if name not in environment]


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and, where the user gives none, MASTER_ADDR and MASTER_PORT."""
    found = {"RANK": environment["SLURM_PROCID"], "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
             "LOCAL_RANK": environment["SLURM_LOCALID"], "LOCAL_WORLD_SIZE": _tasks_here(environment)}
    if "MASTER_ADDR" not in environment:
        found["MASTER_ADDR"] = _first_address(environment)
    if "MASTER_PORT" not in environment:
        found["MASTER_PORT"] = str(job_port(int(environment["SLURM_JOB_ID"]), int(environment["SLURM_STEP_ID"])))
    return found


def step_name(environment: Mapping[str, str]) -> str:
    """The job step, as SLURM writes it."""
    return f"{environment['SLURM_JOB_ID']}.{environment['SLURM_STEP_ID']}"


def hosts_store(environment: Mapping[str, str]) -> bool | None:
    """Whether the ranks meet at this task: the first of the node that MASTER_ADDR is, which need not be rank 0's (srun
    --distribution=arbitrary). None where MASTER_ADDR is the user's own, and so rank 0's by torch's convention."""
    if missing(environment) or environment["MASTER_ADDR"] != _first_address(environment):
        return None
    return environment["SLURM_NODEID"] == "0" and environment["SLURM_LOCALID"] == "0"


def _first_address(environment: Mapping[str, str]) -> str:
    return address(first_host(environment["SLURM_STEP_NODELIST"]))


def _tasks_here(environment: Mapping[str, str]) -> str:
    """This node's entry of SLURM_STEP_TASKS_PER_NODE: "2(x3),1" is 2, 2, 2, 1."""
    counts: list[str] = []
    for part in environment["SLURM_STEP_TASKS_PER_NODE"].split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        assert match, f"SLURM_STEP_TASKS_PER_NODE is {environment['SLURM_STEP_TASKS_PER_NODE']!r}"
        counts += [match[1]] * int(match[2] or 1)
    return counts[int(environment["SLURM_NODEID"])]


def first_host(nodes: str) -> str:
    """The first name of a SLURM node list: n1 of "n[1-2,7]", gpu-003-ib of "gpu-[003-9]-ib,x1"."""
    match = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\])?([^\[,]*)", nodes)
    assert match, f"not a node list: {nodes!r}"
    return match[1] + (match[2] or "") + match[3]


def address(host: str) -> str:
    """The host by name where that resolves, else the address that SLURM itself has for it."""
    try:
        socket.getaddrinfo(host, None)
        return host
    except socket.gaierror:
        if not shutil.which("scontrol"):
            raise
    shown = subprocess.run(["scontrol", "--oneliner", "show", "node", host], capture_output=True, text=True, check=True)
    match = re.search(r"\bNodeAddr=(\S+)", shown.stdout)
    assert match, f"scontrol shows no NodeAddr of {host}: {shown.stdout}"
    return match[1]


def job_port(job: int, step: int = 0, ephemeral_start: int | None = None) -> int:
    """A port of the job's own: the same on all its nodes, below those that the system gives to any connection.

    Neighbouring jobs have ports far apart, and each step another.
    """
    if ephemeral_start is None:
        with open(EPHEMERAL_RANGE) as file:
            ephemeral_start = int(file.read().split()[0])
    lowest = LOWEST_PORT if ephemeral_start >= LOWEST_PORT + 1000 else 1024
    size = max(1, ephemeral_start - lowest)
    return lowest + (job * 31 + step) % size
