"""The ranks: process group, device, seeds, and the same ranks seen as rollout engines.

Rank appears in this module alone. The default process group comes before any engine (vLLM and
DeepSpeed both use it as they find it). A failure on one rank ends all, by `watchdog`.
"""

import contextlib
import os
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from spmd_rl import slurm
from spmd_rl.config import ConfigError, MeshConfig
from spmd_rl.watchdog import AbortWatcher, Place, leave

T = TypeVar("T")
JOB_KEY = "spmd_rl/job"
OTHER_RANKS_WAIT_S = 3.0


@dataclass(frozen=True)
class Ranks:
    """What the launcher said, before any process group exists."""

    rank: int
    world_size: int
    local_rank: int
    hosts_store: bool | None = None
    """Whether the ranks meet at this one; None leaves that to torch: rank 0, or torchrun."""

    @classmethod
    def from_environment(cls) -> "Ranks":
        """torchrun's variables, or those of srun with a task a rank (which are then set as torchrun's); none of them is
        one rank. Raises ConfigError for a part of them only, and for contradictions."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        if "RANK" not in os.environ and slurm.num_tasks(os.environ) > 1:
            absent = slurm.missing(os.environ)
            if absent:
                raise ConfigError(f"srun started {slurm.num_tasks(os.environ)} tasks, but {', '.join(absent)} are not "
                                  "set: pass all SLURM_* variables on (into a container, say), or start with torchrun")
            try:
                # vLLM and torch read them from the environment too.
                os.environ.update(slurm.rank_variables(os.environ))
            except socket.gaierror as error:
                raise ConfigError(f"MASTER_ADDR is not set, and the first of {os.environ['SLURM_STEP_NODELIST']} has "
                                  f"no address ({error}): set MASTER_ADDR to where the ranks shall meet") from None
        missing = [n for n in names if n not in os.environ]
        if missing and ("RANK" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1"):
            raise ConfigError(f"the launcher set some rank variables but not {', '.join(missing)}: "
                              "start with torchrun, or with plain python for one rank")
        if "RANK" not in os.environ:
            return cls(0, 1, 0)
        _check_against_slurm()
        for name in (*names[:3], "MASTER_PORT"):
            if not os.environ[name].isdecimal():
                raise ConfigError(f"{name} is {os.environ[name]!r}: the launcher must set it to a whole number")
        rank, world_size, local_rank = (int(os.environ[n]) for n in names[:3])
        for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank)):
            if not 0 <= value < world_size:
                raise ConfigError(f"{name} is {value}: it must lie in 0..{world_size - 1} for WORLD_SIZE {world_size}")
        is_task = slurm.num_tasks(os.environ) > 1 and "TORCHELASTIC_RUN_ID" not in os.environ
        return cls(rank, world_size, local_rank, slurm.hosts_store(os.environ) if is_task else None)


def _check_against_slurm() -> None:
    """Refuse variables of another job, and a launcher in each of several tasks. Raises ConfigError."""
    tasks = slurm.num_tasks(os.environ)
    if tasks == 1:
        return
    if "TORCHELASTIC_RUN_ID" in os.environ:
        nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
        if tasks != int(nodes):
            raise ConfigError(f"srun started {tasks} tasks, and each a torchrun for {nodes} nodes, "
                              f"{tasks} x {os.environ['LOCAL_WORLD_SIZE']} processes: give srun --ntasks-per-node=1")
        return
    for name, theirs in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")):
        if os.environ[name] != os.environ[theirs]:
            raise ConfigError(f"{name} is {os.environ[name]} but {theirs} is {os.environ[theirs]}: unset RANK, "
                              "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which are left from elsewhere")


class Mesh:
    """The process group, and where this rank stands in it.

    The ranks are `num_engines` rollout engines of `tensor_parallel_size` neighbouring ranks; for
    training each rank is a data-parallel rank of its own.
    """

    def __init__(self, config: MeshConfig, tensor_parallel_size: int, seed: int) -> None:
        """Make the default process group: cpu:gloo,cuda:nccl on GPUs, gloo on CPUs."""
        ranks = Ranks.from_environment()
        self._rank, self.world_size = ranks.rank, ranks.world_size
        self.device = pick_device(config.device, ranks.local_rank)
        if self.device.type == "cuda":
            # Before the first collective: object collectives put their buffers on the current device.
            torch.cuda.set_device(self.device)
        self.host = host_identity()
        self.tensor_parallel_size = tensor_parallel_size
        self.num_engines = self.world_size // tensor_parallel_size
        self.engine_index, self.engine_rank = divmod(self._rank, tensor_parallel_size)
        self._place = Place(0, "start-up", time.monotonic())
        self.step = 0
        """Number of the step under way from 1, for messages; 0 before the first."""
        self._make_process_group(ranks, config.timeout_s)
        self._refuse_shared_gpus()
        self._watcher = AbortWatcher(self._rank, self.world_size, config.timeout_s,
                                     lambda: self._place) if self.world_size > 1 else None
        seed_everything(seed + self._rank)
        if config.full_determinism:
            be_deterministic()

    def _make_process_group(self, ranks: Ranks, timeout_s: float) -> None:
        if "RANK" not in os.environ:
            # vLLM's external launcher reads these even for one rank.
            os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1",
                              MASTER_PORT=str(free_port()))
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        # No device_id: with it every later group would be made eagerly, and NCCL would take its memory up front.
        timeout = timedelta(seconds=timeout_s)
        # For the groups that DeepSpeed and vLLM make, which take torch's default: 10 minutes with NCCL.
        c10d: Any = dist.distributed_c10d
        c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timeout
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        try:
            if ranks.hosts_store is None:
                dist.init_process_group(backend, timeout=timeout)
            else:
                store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None,
                                      ranks.hosts_store, timeout)
                job = slurm.step_name(os.environ)
                if ranks.hosts_store:
                    store.set(JOB_KEY, job)
                elif (found := store.get(JOB_KEY).decode()) != job:  # whose number is the same modulo the ports
                    raise ConfigError(f"MASTER_ADDR and MASTER_PORT are {where}: the ranks of job step {found} meet "
                                      f"there, and this is {job}; set another MASTER_PORT")
                dist.init_process_group(backend, timeout=timeout, store=store, rank=ranks.rank,
                                        world_size=ranks.world_size)
        except dist.DistNetworkError as error:
            raise ConfigError(f"MASTER_ADDR and MASTER_PORT are {where}: the ranks cannot meet there "
                              f"({str(error).splitlines()[0]}); set another MASTER_PORT") from None

    def _refuse_shared_gpus(self) -> None:
        """Raises ConfigError, on all ranks, where two of them have one GPU. Collective."""
        gpu = str(torch.cuda.get_device_properties(self.device).uuid) if self.device.type == "cuda" else None
        text = shared_gpus(self.all_gather((self.host, gpu)))
        if text and "NCCL_HOSTID" not in os.environ:  # set by those who know: NCCL itself refuses it otherwise
            raise ConfigError(text)

    @property
    def phase(self) -> str:
        """What the ranks are doing, for messages."""
        return self._place.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._place = Place(self._place.count + 1, phase, time.monotonic())

    # What only one rank does. -----------------------------------------------------------------------------------

    def on_main(self, make: Callable[[], Sequence[T]]) -> Sequence[T]:
        """What `make` returns on the first rank, nothing elsewhere: for writers and other sinks."""
        return make() if self._rank == 0 else ()

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
        self.phase = self.phase  # arrived: who has not is late
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value)
        return gathered

    def gather_lists(self, values: Sequence[T]) -> list[T]:
        """All ranks' lists, one after the other."""
        return [value for part in self.all_gather(list(values)) for value in part]

    def all_true(self, value: bool) -> bool:
        """Whether it holds on every rank: what a branch in front of a collective may depend on."""
        return all(self.all_gather(bool(value)))

    def smallest_device_bytes(self) -> int | None:
        """Memory of the job's smallest GPU; None on CPU. Collective."""
        return min((size for size in self.all_gather(device_bytes(self.device)) if size), default=None)

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

    def fail(self, error: BaseException, phase: str | None = None) -> NoReturn:
        """End this process with `error`'s traceback, and the other ranks with it, now.

        No clean-up: destroying groups or engines waits for peers that are inside other collectives.
        phase: where it happened, if not in the main thread's.
        """
        phase = phase or self.phase
        text = "".join(traceback.format_exception(error))
        if self._watcher and "timed out" in str(error).lower():
            text += self._watcher.describe_others() + "\n"
        print(f"\n[rank {self._rank}] failed in phase {phase}:\n{text}", file=sys.stderr, flush=True)
        if self._watcher:
            self._watcher.abort(f"rank {self._rank} failed in phase {phase}: {type(error).__name__}: {error}")
        leave(1)


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


def be_deterministic() -> None:
    """Kernels whose result does not depend on the order of threads, or an error where there is none."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Else each new tensor is first filled with NaN, vLLM's caches and padding too, which it computes over.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def generator_states() -> dict[str, Any]:
    """States of Python's, NumPy's, torch's and the current GPU's generators, as plain values and tensors."""
    import numpy as np

    kind, keys, *rest = np.random.get_state()
    return {"python": random.getstate(), "numpy": (kind, [int(key) for key in keys], *rest),
            "torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None}


def restore_generators(states: dict[str, Any]) -> None:
    """The reverse of `generator_states`."""
    import numpy as np

    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"])


@contextlib.contextmanager
def preserved_process_state() -> Iterator[None]:
    """Generators, environment and thread counts are the same after the block as before.

    Building a vLLM engine seeds all generators, overwrites LOCAL_WORLD_SIZE and others, and on CPU
    replaces torch.set_num_threads by a function that does nothing.
    """
    environment, states = dict(os.environ), generator_states()
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    dtype = torch.get_default_dtype()
    try:
        yield
    finally:
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        # Only what changed: other threads may be reading the environment.
        os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})
        restore_generators(states)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        torch.set_default_dtype(dtype)


def check_device(config: MeshConfig) -> torch.device:
    """This rank's device. Raises ConfigError where it is not there, or the host's GPUs are more than its ranks."""
    device, here = pick_device(config.device, Ranks.from_environment().local_rank), _ranks_here()
    if device.type == "cuda" and here is not None and here < torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ConfigError(f"this host shows {count} GPUs and runs {here} rank{'s' * (here > 1)}: start one a GPU "
                          f"(torchrun --nproc_per_node {count}), or show fewer (CUDA_VISIBLE_DEVICES="
                          f"{','.join(map(str, range(here)))})")
    return device


def _ranks_here() -> int | None:
    """Ranks on this host, where that was said."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "1" if "RANK" not in os.environ else "")
    return int(said) if said.isdecimal() else None


def shared_gpus(seen: Sequence[tuple[str, str | None]]) -> str | None:
    """What to say of ranks whose (host, GPU) is another's; None where each has its own."""
    by_gpu: dict[tuple[str, str], list[int]] = {}
    for rank, (host, gpu) in enumerate(seen):
        if gpu is not None:
            by_gpu.setdefault((host, gpu), []).append(rank)
    shared = [f"ranks {', '.join(map(str, ranks))} have GPU {gpu}" for (_, gpu), ranks in by_gpu.items()
              if len(ranks) > 1]
    return (f"{'; '.join(shared)} of one host: each rank needs a GPU of its own; is LOCAL_RANK the rank within the "
            "host?" if shared else None)


def pick_device(wanted: str, local_rank: int) -> torch.device:
    """The rank's device. Raises ConfigError where this host has no such GPU."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise ConfigError("mesh.device is 'cuda': this host shows no GPU; set auto or mesh.device cpu")
    if local_rank >= count:
        raise ConfigError(f"LOCAL_RANK is {local_rank} but this host shows {count} GPUs: start at most {count} "
                          "ranks a host, or set mesh.device cpu (srun: --gpu-bind=none shows each task all GPUs)")
    return torch.device("cuda", local_rank)


def device_bytes(device: torch.device) -> int | None:
    """Memory of a GPU; None for the host."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def used_bytes(device: torch.device) -> int:
    """Memory in use on a GPU, by the driver; for the host this process's."""
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        return total_bytes - free_bytes
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def say_error(text: str) -> None:
    """Print on the first rank at once. The others wait a moment: what all ranks found is then said once, since the
    launcher ends them, and what one alone found is still said."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(OTHER_RANKS_WAIT_S)  # the launcher ends this rank meanwhile if the first one failed too
    print(f"error: {text}" if rank == "0" else f"[rank {rank}] error: {text}", file=sys.stderr, flush=True)


def say_once(text: str, file: Any = None) -> None:
    """Print on the first rank only; needs no process group."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=file or sys.stdout, flush=True)
