"""Prints what a process makes of its launcher's variables, and the sum of a one from each rank: no engine."""

import os
import time

import torch
import torch.distributed as dist

from spmd_rl.config import ConfigError, MeshConfig
from spmd_rl.mesh import Mesh, Ranks

try:
    ranks = Ranks.from_environment()
except ConfigError as error:
    print(f"refused: {error}", flush=True)
    raise SystemExit(2) from None
try:
    mesh = Mesh(MeshConfig(device="cpu", timeout_s=60), 1, 0)
except ConfigError as error:
    print(f"refused: {error}", flush=True)
    raise SystemExit(2) from None
ones = torch.ones(1)
dist.all_reduce(ones)
time.sleep(float(os.environ.get("STAY_SECONDS", "0")))
node = os.environ.get("SLURMD_NODENAME", "here")
line = f"rank {ranks.rank} of {ranks.world_size}, local {ranks.local_rank} on {node}: sum {int(ones)}\n"
os.write(1, line.encode())  # at once: print may write text and end of line apart, and ranks share the pipe
mesh.leave_together()
mesh.close()
