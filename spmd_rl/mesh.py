"""The ranks: process group, device, seeds, and the same ranks seen as rollout engines.

Rank appears in this module alone. The default process group comes before any engine (vLLM and
DeepSpeed both use it as they find it). A failure on one rank ends all: the failing rank writes an
abort key into the rendezvous store, and every rank has a thread that looks at it.
"""

import contextlib
import os
import random
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from spmd_rl.config import ConfigError, MeshConfig

T = TypeVar("T")
ABORT_KEY = "spmd_rl/abort"
ABORT_POLL_S = 0.5


@dataclass(frozen=True)
class Ranks:
    """What the launcher said, before any process group exists."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def from_environment(cls) -> "Ranks":
        """torchrun's variables; none of them is one rank. Raises ConfigError for a part of them only."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        missing = [n for n in names if n not in os.environ]
        if missing and ("RANK" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1"):
            raise ConfigError(f"the launcher set some rank variables but not {', '.join(missing)}: "
                              "start with torchrun, or with plain python for one rank")
        if "RANK" not in os.environ:
            tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
            if tasks != "1":
                raise ConfigError(f"srun started {tasks} tasks, but RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
                                  "MASTER_PORT are not set: start one torchrun a node with srun")
            return cls(0, 1, 0)
        for name in (*names[:3], "MASTER_PORT"):
            if not os.environ[name].isdecimal():
                raise ConfigError(f"{name} is {os.environ[name]!r}: the launcher must set it to a whole number")
        rank, world_size, local_rank = (int(os.environ[n]) for n in names[:3])
        for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank)):
            if not 0 <= value < world_size:
                raise ConfigError(f"{name} is {value}: it must lie in 0..{world_size - 1} for WORLD_SIZE {world_size}")
        return cls(rank, world_size, local_rank)


class Mesh:
    """The process group, and where this rank stands in it.

    The ranks are `num_engines` rollout engines of `tensor_parallel_size` neighbouring ranks; for
    training each rank is a data-parallel rank of its own.
    """

    def __init__(self, config: MeshConfig, tensor_parallel_size: int, seed: int) -> None:
        """Make the default process group: cpu:gloo,cuda:nccl on GPUs, gloo on CPUs."""
        ranks = Ranks.from_environment()
        self._rank, self.world_size = ranks.rank, ranks.world_size
        self.device = self._pick_device(config.device, ranks.local_rank)
        self.host = host_identity()
        self.tensor_parallel_size = tensor_parallel_size
        self.num_engines = self.world_size // tensor_parallel_size
        self.engine_index, self.engine_rank = divmod(self._rank, tensor_parallel_size)
        self.phase = "start-up"
        self._make_process_group(ranks, config.timeout_s)
        self._watcher = AbortWatcher(self._rank) if self.world_size > 1 else None
        seed_everything(seed + self._rank)
        if config.full_determinism:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)

    @staticmethod
    def _pick_device(wanted: str, local_rank: int) -> torch.device:
        if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
            return torch.device("cpu")
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise ConfigError(f"LOCAL_RANK is {local_rank} but this host shows {count} GPUs: start at most {count} "
                              "ranks a host, or set mesh.device cpu")
        # Before the first collective: object collectives put their buffers on the current device.
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)

    def _make_process_group(self, ranks: Ranks, timeout_s: float) -> None:
        if "RANK" not in os.environ:
            # vLLM's external launcher reads these even for one rank.
            os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1",
                              MASTER_PORT=str(free_port()))
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        # No device_id: with it every later group would be made eagerly, and NCCL would take its memory up front.
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))

    # What only one rank does. -----------------------------------------------------------------------------------

    def on_main(self, make: Callable[[], Sequence[T]]) -> Sequence[T]:
        """What `make` returns on the first rank, nothing elsewhere: for writers and other sinks."""
        return make() if self._rank == 0 else ()

    def is_first_on_host(self) -> bool:
        """Whether this rank is the first of those on its machine. Collective."""
        return self.all_gather(self.host).index(self.host) == self._rank

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's part of a list of the step's, one part a rank: neighbours, sizes equal to within one."""
        return split(items, self.world_size)[self._rank]

    def engine_share(self, items: Sequence[T]) -> Sequence[T]:
        """The part of a list that this rank's engine takes; all ranks of an engine get the same."""
        return split(items, self.num_engines)[self.engine_index]

    def rank_share_of_engine(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's part of what its engine has: work that each of the engine's ranks could do, done once."""
        return split(items, self.tensor_parallel_size)[self.engine_rank]

    def mine(self, parts: Sequence[T]) -> T:
        """This rank's entry of a list with one entry a rank."""
        assert len(parts) == self.world_size, f"{len(parts)} parts for {self.world_size} ranks"
        return parts[self._rank]

    # Collectives: every rank calls them, in the same order. -----------------------------------------------------

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order. Objects hold no CUDA tensors (they would land on their own device)."""
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value)
        return gathered

    def gather_lists(self, values: Sequence[T]) -> list[T]:
        """All ranks' lists, one after the other."""
        return [value for part in self.all_gather(list(values)) for value in part]

    def all_true(self, value: bool) -> bool:
        """Whether it holds on every rank: what a branch in front of a collective may depend on."""
        return all(self.all_gather(bool(value)))

    def barrier(self) -> None:
        """Wait for all ranks (over gloo: it orders processes, no CUDA stream)."""
        self.all_gather(None)

    # End. -------------------------------------------------------------------------------------------------------

    def leave_together(self) -> None:
        """Agree that the run is over: after this no rank looks for a failure of the others. Collective."""
        self.barrier()  # a rank that is done must not take the store away from one that still writes
        if self._watcher:
            self._watcher.stop()
            self.barrier()  # every watcher has stopped before the store's host leaves

    def close(self) -> None:
        """Destroy the process groups that are left."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def fail(self, error: BaseException) -> NoReturn:
        """End this process with `error`'s traceback, and the other ranks with it, now.

        No clean-up: destroying groups or engines waits for peers that are inside other collectives.
        """
        text = "".join(traceback.format_exception(error))
        print(f"\n[rank {self._rank}] failed in phase {self.phase}:\n{text}", file=sys.stderr, flush=True)
        if self._watcher:
            self._watcher.abort(f"rank {self._rank} failed in phase {self.phase}: {type(error).__name__}: {error}")
        leave(1)


class AbortWatcher:
    """A thread that ends this process once any rank has set the abort key.

    It has a connection to the store of its own: the process group's client is locked while it waits.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._stop = threading.Event()
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._key = f"{ABORT_KEY}/{attempt}"
        self._store = self._connect()
        self._abort_store = self._connect()
        self._thread = threading.Thread(target=self._watch, name="abort-watcher", daemon=True)
        self._thread.start()

    @staticmethod
    def _connect() -> dist.TCPStore:
        return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False,
                             timeout=timedelta(seconds=60))

    def _watch(self) -> None:
        while not self._stop.wait(ABORT_POLL_S):
            try:
                reason = self._store.get(self._key).decode() if self._store.check([self._key]) else None
            except dist.DistError as error:
                reason = f"the rendezvous store is gone, so the process that held it is: {error}"
            if reason and not self._stop.is_set():
                print(f"[rank {self._rank}] leaves: {reason}", file=sys.stderr, flush=True)
                leave(1)

    def abort(self, reason: str) -> None:
        """Tell every rank to leave."""
        self._stop.set()
        try:
            self._abort_store.set(self._key, reason)
        except dist.DistError as error:
            print(f"[rank {self._rank}] could not tell the others: {error}", file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Look no more."""
        self._stop.set()
        self._thread.join()


def leave(code: int) -> NoReturn:
    """Exit without Python's tear-down, which would wait for other threads and groups."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def split(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Neighbouring parts in order, sizes equal to within one, the larger first."""
    size, extra = divmod(len(items), parts)
    bounds = [i * size + min(i, extra) for i in range(parts + 1)]
    return [items[a:b] for a, b in zip(bounds, bounds[1:])]


def host_identity() -> str:
    """The machine, not the name NCCL is told: the kernel's boot id, else the host name."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def free_port() -> int:
    """A port that is free now, chosen by the system."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextlib.contextmanager
def preserved_process_state() -> Iterator[None]:
    """Generators, environment and thread counts are the same after the block as before.

    Building a vLLM engine seeds all generators, overwrites LOCAL_WORLD_SIZE and others, and on CPU
    replaces torch.set_num_threads by a function that does nothing.
    """
    import numpy as np

    environment = dict(os.environ)
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    dtype = torch.get_default_dtype()
    try:
        yield
    finally:
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        # Only what changed: other threads may be reading the environment.
        os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        torch.set_default_dtype(dtype)


def say_once(text: str, file: Any = None) -> None:
    """Print on the first rank only; needs no process group."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=file or sys.stdout, flush=True)
