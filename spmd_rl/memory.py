"""Who is on the device in which phase, and the moves between.

The table says which tenants a phase needs; `enter` walks it: those not in the next phase leave first, then
the new ones come. In this plain form the engine's two tenants move, and the policy stays.
"""

import os
from enum import Enum

import torch

from spmd_rl.mesh import Mesh
from spmd_rl.metrics import Metrics
from spmd_rl.rollout import EngineState, Rollout


class Tenant(Enum):
    """What takes memory on the device and can leave it."""

    ENGINE_WEIGHTS = "engine weights"
    KV_CACHE = "KV cache"


PHASES: dict[str, set[Tenant]] = {
    "rollout": {Tenant.ENGINE_WEIGHTS, Tenant.KV_CACHE},
    "train": set(),
    "sync": {Tenant.ENGINE_WEIGHTS},
}


class Memory:
    """Moves tenants as phases change, and reports what the driver sees."""

    def __init__(self, mesh: Mesh, rollout: Rollout, metrics: Metrics) -> None:
        self._mesh, self._rollout, self._metrics = mesh, rollout, metrics
        self.phase = "train"

    def enter(self, phase: str) -> None:
        """Bring the device to `phase`. A phase entered twice moves nothing.

        From train to rollout leads through sync: the engine's weights are gone while it sleeps.
        """
        with self._metrics.timed("swap"):
            self._report(self.phase)
            wanted = PHASES[phase]
            if Tenant.ENGINE_WEIGHTS not in wanted:
                self._rollout.sleep()
                if self._mesh.device.type == "cuda":
                    torch.cuda.empty_cache()  # what vLLM's own tensors left cached is of no use to the policy
            else:
                if self._rollout.state is EngineState.ASLEEP and self._mesh.device.type == "cuda":
                    torch.cuda.empty_cache()  # the pool maps memory by the driver, which sees torch's cache as taken
                self._rollout.wake_weights()
            if Tenant.KV_CACHE in wanted:
                if self._rollout.state is EngineState.WEIGHTS_LOADED and self._mesh.device.type == "cuda":
                    torch.cuda.empty_cache()  # gathered weights and the reload's temporaries, for the same reason
                self._rollout.wake_kv_cache()
            self.phase = phase

    def _report(self, phase: str) -> None:
        """Memory in use at the end of a phase in GiB: the device's by the driver, else this process's."""
        if self._mesh.device.type == "cuda":
            free_bytes, total_bytes = torch.cuda.mem_get_info(self._mesh.device)
            used_bytes = total_bytes - free_bytes
            self._metrics.maximum(f"memory/{phase}_peak_allocated_gib",
                                  torch.cuda.max_memory_allocated(self._mesh.device) / 2**30)
            torch.cuda.reset_peak_memory_stats(self._mesh.device)
        else:
            with open("/proc/self/statm") as file:
                used_bytes = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        self._metrics.maximum(f"memory/{phase}_gib", used_bytes / 2**30)
