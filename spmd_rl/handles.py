"""A storage in another process of this host: CUDA's IPC handles, or shared memory for a CPU's.

One export is opened once, by one process: torch counts the readers of an export, and keeps its memory until as many
have let go as it was made for.
"""

import os
import shutil
from dataclasses import dataclass
from typing import Any

import torch

SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Place:
    """A process and its device, as other processes can tell them apart."""

    host: str
    device: str
    """UUID of a GPU, or cpu. Ranks that share a GPU have the same."""
    pid: int

    @classmethod
    def here(cls, device: torch.device, host: str) -> "Place":
        """This process's."""
        return cls(host, _uuid(device.index or 0) if device.type == "cuda" else "cpu", os.getpid())


@dataclass(frozen=True)
class Handle:
    """Opens one storage once."""

    place: Place
    """Of the process that has the storage."""
    num_bytes: int
    arguments: tuple[Any, ...]
    """What torch's own opening takes."""


def export(storage: torch.UntypedStorage, place: Place) -> Handle:
    """A handle for one other process. A CPU's storage moves into shared memory, where its views follow it."""
    if storage.device.type == "cuda":
        return Handle(place, storage.nbytes(), storage._share_cuda_())
    return Handle(place, storage.nbytes(), storage._share_filename_cpu_())


def check_room(place: Place, num_bytes: int) -> None:
    """Raises RuntimeError where a CPU's storages of this size do not fit into shared memory: writing there would end
    the process."""
    if place.device == "cpu" and shutil.disk_usage(SHARED_MEMORY).free < 1.1 * num_bytes:
        raise RuntimeError(f"{SHARED_MEMORY} has no room for {num_bytes / 2**20:.0f} MiB")


def open_handle(handle: Handle, place: Place) -> torch.UntypedStorage:
    """The storage, mapped into this process. It has to be dropped before its owner may free or move it.

    Raises RuntimeError where it lies elsewhere, or cannot be opened.
    """
    if handle.place.host != place.host:
        raise RuntimeError(f"a handle of host {handle.place.host} cannot be opened on host {place.host}")
    if (handle.place.device == "cpu") != (place.device == "cpu"):
        raise RuntimeError(f"a handle of device {handle.place.device} cannot be opened for device {place.device}")
    if handle.place.device == "cpu":
        return torch.UntypedStorage._new_shared_filename_cpu(*handle.arguments)
    if handle.place.pid == place.pid:
        raise RuntimeError("a process cannot open a CUDA handle of its own")
    if handle.place.device not in _visible():
        raise RuntimeError(f"GPU {handle.place.device} cannot be seen by this process: show every rank all GPUs of its "
                           "host (in SLURM --gpu-bind=none)")
    # On this process's device: on the owner's it would make a context there, half a GiB a reader.
    return torch.UntypedStorage._new_shared_cuda(torch.cuda.current_device(), *handle.arguments[1:])


def release() -> None:
    """Free what was exported and is no longer open anywhere. Only after all readers have dropped it, and said so."""
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _visible() -> set[str]:
    return {_uuid(index) for index in range(torch.cuda.device_count())}
