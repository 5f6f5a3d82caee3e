"""One rank of test_watchdog.py: ``worker_watchdog.py CASE PHASE TIMEOUT_S``. Rank 1 is slow or gone; no engine.

slow: 8 s in PHASE, a save being a real one; killed and lost: a phase without the other rank, in which one of them goes.
"""

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from spmd_rl.checkpoint import Progress, Saver
from spmd_rl.config import Config, MeshConfig
from spmd_rl.mesh import Mesh
from spmd_rl.metrics import Metrics
from spmd_rl.shards import Piece

case, phase, timeout_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
mesh = Mesh(MeshConfig(device="cpu", timeout_s=timeout_s), 1, 0)
metrics = Metrics(mesh, [])
second = mesh.mine([False, True])


class SlowPolicy:
    """A tensor of which rank 1 takes its time."""

    def pieces(self):
        time.sleep(8 if second else 0)
        return [Piece("master", "a", 0, torch.ones(3))]

    def shapes(self):
        return {"a": (3,)}

    def progress(self):
        return {}


def slow():
    """Rank 1 keeps the other waiting."""
    if phase != "save":
        with metrics.timed(phase):
            time.sleep(8 if second else 0)
        with metrics.timed("gather"):
            mesh.barrier()  # where the first rank waits for the second
        return
    config = Config()
    config.run.output_dir = mesh.all_gather(tempfile.mkdtemp())[0]
    Path(config.run.output_dir, "metrics.jsonl").write_text("")
    with metrics.timed("save"):
        Saver(config, mesh, SlowPolicy(), None).save(Progress())


def busy():
    """A phase of each rank's own, with no connection to the other that could break."""
    with metrics.timed(phase):
        if case == "killed" and second:
            os.kill(os.getpid(), signal.SIGKILL)
        print("busy", flush=True)
        time.sleep(100)


try:
    with metrics.timed("step"):
        slow() if case == "slow" else busy()
except BaseException as error:
    mesh.fail(error)
mesh.leave_together()
mesh.close()
print("all together", flush=True)
