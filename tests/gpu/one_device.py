"""`python one_device.py ARGUMENTS` is spmd_rl.train with every rank on the first GPU: NCCL, which takes no two ranks of
a host to one device, gets a host's name a rank."""

import os
import runpy

os.environ.update(LOCAL_RANK="0", NCCL_HOSTID=f"simulated-{os.environ['RANK']}")
runpy.run_module("spmd_rl.train", run_name="__main__")
