"""torchrun that passes signals on to the ranks and exits with their code: ``torchrun.py TORCHRUN-OPTIONS``.

torchrun itself ends its ranks 30 s after a signal, and exits with 1 whatever theirs was. Here SIGTERM, SIGINT, SIGUSR1
and SIGUSR2 reach every rank, which ends its step and saves; 75 (ended early, start again) and 2 (a config that
cannot be used) arrive at the caller. `--slurm` in front adds the options of one torchrun a node of a SLURM step.
"""

import os
import signal
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def children() -> list[int]:
    """Process ids of this process's children: the ranks."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended in the meantime
        if parent == os.getpid():
            found.append(int(name))
    return found


def pass_on(number: int, frame: object) -> None:
    """Send the signal to every rank."""
    for child in children():
        try:
            os.kill(child, number)
        except ProcessLookupError:
            pass  # it has ended by itself


def slurm_options() -> list[str]:
    """The node's place in the step, and where the ranks meet."""
    from spmd_rl.slurm import address, first_host, job_port, num_tasks

    tasks, nodes = num_tasks(os.environ), int(os.environ["SLURM_STEP_NUM_NODES"])
    if tasks != nodes:
        sys.exit(f"torchrun.py: srun started {tasks} tasks on {nodes} nodes: give it --ntasks-per-node=1, one torchrun "
                 "a node")
    host = os.environ.get("MASTER_ADDR") or address(first_host(os.environ["SLURM_STEP_NODELIST"]))
    port = os.environ.get("MASTER_PORT") or job_port(int(os.environ["SLURM_JOB_ID"]), int(os.environ["SLURM_STEP_ID"]))
    return [f"--nnodes={nodes}", f"--node-rank={os.environ['SLURM_NODEID']}", f"--master-addr={host}",
            f"--master-port={port}"]


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] == ["--slurm"]:
        arguments = [*slurm_options(), *arguments[1:]]
    for number in PASSED_ON:
        signal.signal(number, pass_on)
    try:
        main(["--signals-to-handle=SIGHUP,SIGQUIT", *arguments])
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        if code not in (2, 75):
            print(error, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        # At the first task that leaves SLURM sends SIGTERM to the others; in the interpreter's tear-down, where
        # handlers are gone, it would turn a code of 75 into a failure.
        os._exit(code if code > 0 else 1)
