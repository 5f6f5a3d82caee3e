"""What a rank says of its GPU: NVML's view of it, by the device's own name."""

import os
import time

import pytest
import torch

from spmd_rl.system import System

pytestmark = pytest.mark.gpu
BUSY_S = 5.0
DEVICE = torch.device("cuda", 0)


def work_for(seconds):
    """Matrix products without a pause."""
    matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device=DEVICE)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(20):
            matrix @ matrix
        torch.cuda.synchronize(DEVICE)


def test_a_busy_gpu_is_seen_as_busy():
    """The mean of a reading a second, over the time since the last asking; the readings start anew then."""
    work_for(1)  # the first product loads its library
    system = System(DEVICE)
    work_for(BUSY_S)
    found = system.read()
    assert 0.5 < found["perf/gpu_utilization"] <= 1, found
    assert found["memory/host_used_gib"] > 0 and found["memory/process_gib"] > 0
    assert len(system._gpu._values) <= 1 and system._gpu._fault is None


def test_the_device_is_found_by_its_name():
    """The driver's index need not be torch's: the handle is that of the device with torch's UUID and total memory."""
    import pynvml  # the gpu extra's

    watch = System(DEVICE)._gpu
    properties = torch.cuda.get_device_properties(DEVICE)
    assert pynvml.nvmlDeviceGetUUID(watch._handle) == f"GPU-{properties.uuid}"
    held = torch.empty(2**31, dtype=torch.uint8, device=DEVICE)
    free, total = torch.cuda.mem_get_info(DEVICE)
    seen = pynvml.nvmlDeviceGetMemoryInfo(watch._handle)
    # NVML also counts what the driver keeps for itself.
    assert seen.total == pytest.approx(total, rel=0.05)
    assert seen.used > held.nbytes and abs(seen.used - (total - free)) < 0.05 * total


def test_another_process_that_sees_no_gpu_has_no_watch(monkeypatch):
    """A driver that does not know the name (a part of a GPU): no metric, no error."""
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: type("Part", (), {"uuid": os.urandom(4)}))
    assert "perf/gpu_utilization" not in System(DEVICE).read()
