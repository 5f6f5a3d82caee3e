"""`python one_device.py ARGUMENTS` is spmd_rl.train with every rank on the first GPU: NCCL, which takes no two ranks of
a host to one device, gets a host's name a rank."""

import os
import runpy

from spmd_rl.rollout import Rollout

alone = Rollout.sleep


def together(self):
    """vLLM takes what other processes allocate while it falls asleep for its own, and fails: an engine that still
    starts, or training states that return."""
    self._mesh.all_gather(0)
    alone(self)
    self._mesh.all_gather(0)


os.environ.update(LOCAL_RANK="0", NCCL_HOSTID=f"simulated-{os.environ['RANK']}")
Rollout.sleep = together
runpy.run_module("spmd_rl.train", run_name="__main__")
