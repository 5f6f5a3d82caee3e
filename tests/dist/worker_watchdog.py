"""One rank of test_watchdog.py: ``worker_watchdog.py CASE TIMEOUT_S``. Rank 1 is slow or gone; no engine."""

import os
import signal
import sys
import time

from spmd_rl.config import MeshConfig
from spmd_rl.mesh import Mesh
from spmd_rl.metrics import Metrics

case, timeout_s = sys.argv[1], float(sys.argv[2])
mesh = Mesh(MeshConfig(device="cpu", timeout_s=timeout_s), 1, 0)
metrics = Metrics(mesh, [])
second = mesh.mine([False, True])
try:
    with metrics.timed("step"):
        with metrics.timed("reward"):
            if case == "slow" and second:
                time.sleep(8)
            if case == "killed" and second:
                os.kill(os.getpid(), signal.SIGKILL)
            if case == "killed":
                time.sleep(100)  # in a phase of its own, with no connection to the other that could break
        with metrics.timed("gather"):
            mesh.barrier()  # where the first rank waits for the second
except BaseException as error:
    mesh.fail(error)
mesh.leave_together()
mesh.close()
print("all together", flush=True)
