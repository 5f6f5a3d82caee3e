"""A whole job on one GPU whose phases are walked by hand, for test_memory_gpu.py.

    python worker_memory.py CONFIG.yaml RESULTS.json CYCLES
"""

import json
import sys
from pathlib import Path

import torch
from phases import saved_in_phases

from spmd_rl.config import parse
from spmd_rl.job import Job, load_inputs, memory_plan
from spmd_rl.mesh import Mesh
from spmd_rl.offload import Tenant
from spmd_rl.rollout import Sampling
from spmd_rl.step import sync, train_step
from spmd_rl.watchdog import leave

GIB = 2**30


def greedy(job):
    """Token ids of three prompts' greedy completions."""
    prompts = job.inputs.train_prompts[:3]
    made = job.parts.rollout.generate(prompts, 0, 0, Sampling(1, 6, temperature=0.0))
    return [completion.token_ids for completion in made]


def used_gib():
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


def main():
    torch.zeros(1, device="cuda")
    context = used_gib()
    config, _ = parse(["--config", sys.argv[1], "--model.dtype", "bfloat16"])
    inputs = load_inputs(config, 1)
    inputs.rewards.start()
    mesh = Mesh(config.mesh, 1, config.run.seed)
    job = Job(config, mesh, inputs, memory_plan(config, inputs, 1, mesh.smallest_device_bytes()))
    memory = job.parts.memory
    found = {"greedy": [greedy(job)], "used": [], "refused": [], "unexplained": [], "sampling": used_gib() - context,
             "device": torch.cuda.mem_get_info()[1] / GIB, "always": job.parts.rollout.always_bytes / GIB,
             "policy_weights": memory._offloader.bytes_on_device()[Tenant.WEIGHTS] / GIB}
    for _ in range(int(sys.argv[3])):
        memory.enter("train")
        memory.wait_for_step()
        found["used"].append(used_gib())
        residents = (sum(memory._offloader.bytes_on_device().values()) + job.parts.rollout.always_bytes) / GIB
        found["unexplained"].append(used_gib() - context - residents)
        for wrong in (lambda: memory.enter("rollout"), lambda: greedy(job), job.parts.weight_sync.sync):
            try:
                wrong()
            except RuntimeError as error:
                found["refused"].append(str(error))
        memory.enter("train")  # a second time
        sync(job.parts)
        memory.enter("rollout")
        found["greedy"].append(greedy(job))
    found["pool_gib"] = {tag: job.parts.rollout.pool_bytes(tag) / GIB for tag in ("weights", "kv_cache")}
    train_step(job.parts, 0)  # makes the moments
    found["saved"] = saved_in_phases(job.parts, job.saver)
    memory.enter("train")
    memory.wait_for_step()
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free - GIB, dtype=torch.uint8, device="cuda")
    try:
        torch.empty(8 * GIB, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        found["explained"] = memory.explain(error)
    del hog
    job.close()
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
    leave(0)
