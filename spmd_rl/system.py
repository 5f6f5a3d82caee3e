"""What a rank's machine is doing: memory of the host and the process, and how busy processors and GPU are."""

import os
import threading
from typing import Any

import torch

GPU_SAMPLE_S = 1.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class System:
    """Values since the last reading."""

    def __init__(self, device: torch.device) -> None:
        self._cpu = _cpu_times()
        self._gpu = watch_gpu(device) if device.type == "cuda" else None

    def read(self) -> dict[str, float]:
        """memory/host_used_gib (of the machine), memory/process_gib (resident, this rank), perf/cpu_utilization (share
        of the machine's processors) and, where pynvml is installed, perf/gpu_utilization (of time with a kernel)."""
        before, self._cpu = self._cpu, _cpu_times()
        busy, total = self._cpu[0] - before[0], self._cpu[1] - before[1]
        with open("/proc/self/statm", encoding="utf-8") as file:
            process_bytes = int(file.read().split()[1]) * PAGE_BYTES
        found = {"memory/host_used_gib": _host_used_bytes() / 2**30, "memory/process_gib": process_bytes / 2**30}
        if total:
            found["perf/cpu_utilization"] = busy / total
        return found | (self._gpu.read() if self._gpu else {})


class GpuWatch:
    """A thread that asks the driver once a second."""

    def __init__(self, device: torch.device, nvml: Any) -> None:
        """Raises nvml's NVMLError where the driver does not know the device by its name."""
        nvml.nvmlInit()
        self._nvml = nvml
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)  # the index here need not be the driver's
        self._values: list[float] = []
        self._fault: str | None = None
        threading.Thread(target=self._watch, name="gpu-watch", daemon=True).start()

    def _watch(self) -> None:
        pause = threading.Event()
        while not self._fault:
            try:
                self._values.append(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100)
            except self._nvml.NVMLError as error:
                self._fault = str(error)  # not supported on a part of a GPU, say: then there is no such metric
            pause.wait(GPU_SAMPLE_S)

    def read(self) -> dict[str, float]:
        """Mean of the samples since the last reading."""
        values, self._values = self._values, []
        return {"perf/gpu_utilization": sum(values) / len(values)} if values else {}


def watch_gpu(device: torch.device) -> GpuWatch | None:
    """The device's watch; None, and no such metric, without pynvml or where the driver cannot tell (parts of a GPU)."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        return GpuWatch(device, pynvml)
    except pynvml.NVMLError:
        return None


def _cpu_times() -> tuple[int, int]:
    """(busy, total) ticks of all processors since the machine started."""
    with open("/proc/stat", encoding="utf-8") as file:
        ticks = [int(value) for value in file.readline().split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _host_used_bytes() -> int:
    with open("/proc/meminfo", encoding="utf-8") as file:
        kib = {line.split(":")[0]: int(line.split()[1]) for line in file}
    return (kib["MemTotal"] - kib["MemAvailable"]) * 1024
