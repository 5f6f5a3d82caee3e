"""Who is on the device in which phase, and the moves between.

`enter` walks the table of `plan`: those not in the next phase leave first, then the new ones come. What the
optimizer step alone needs comes back behind forward and backward, and leaves behind the weight sync and, where the
KV cache fits beside it, behind generation.
"""

import contextlib
import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TextIO

import torch

from spmd_rl.mesh import Mesh, used_bytes
from spmd_rl.metrics import Metrics
from spmd_rl.offload import HostMemory, Moved, Offloader, Storages, Tenant
from spmd_rl.plan import ENGINE, PHASES, POLICY, Plan
from spmd_rl.rollout import EngineState, Rollout

GIB = 2**30
SLACK_BYTES = GIB  # left free beside what a phase is known to take
STEP_ONLY = (Tenant.MASTERS, Tenant.MOMENTS)  # not needed before the optimizer step
ENGINE_ALWAYS = "engine, always"  # beside what its sleep frees
MOVABLE = (Tenant.REFERENCE, *POLICY)


def claim_workspaces(device: torch.device) -> None:
    """Make cuBLAS's workspaces of the two threads that compute, before anything else is on the device.

    Each is then alone in a segment of its own size. Made later it lies in a segment of gigabytes, which it keeps from
    the driver when all else has left. They cannot be cleared instead: CUDA graphs hold their addresses.
    """
    if device.type == "cuda":
        for dtype in (torch.bfloat16, torch.float32):
            a = torch.ones(128, 128, dtype=dtype, device=device, requires_grad=True)
            (a @ a).sum().backward()  # backward runs on a thread with a handle of its own


@contextlib.contextmanager
def away(device: torch.device, host: HostMemory, find: Callable[[], Storages],
         tenants: Collection[Tenant]) -> Iterator[None]:
    """In the block, these are on the host: an engine that starts in it measures what is free."""
    mover = Offloader(device, host, find)
    mover.leave(tenants)
    mover.finish_leaving()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # vLLM asks the driver
    yield
    mover.enter([tenant for tenant in Tenant if tenant in tenants])
    mover.wait(tenants)
    mover.forget_all()


class Resident:
    """Everything stays where it is: a learning half that has no engine to take turns with."""

    def enter(self, phase: str) -> None:
        """Nothing moves."""

    def wait_for_step(self) -> None:
        """Nothing is away."""

    def holding(self, tenants: Collection[Tenant]) -> contextlib.AbstractContextManager:
        """They are there."""
        return contextlib.nullcontext()


class Memory:
    """Moves tenants as phases change, and reports what the driver sees."""

    def __init__(self, mesh: Mesh, rollout: Rollout, find: Callable[[], Storages], host: HostMemory, metrics: Metrics,
                 plan: Plan, timelines: Sequence[TextIO] = ()) -> None:
        """find: storages of policy and reference; timelines: where each change of phase is written, one JSON a line."""
        self._mesh, self._rollout, self._metrics, self._plan = mesh, rollout, metrics, plan
        self._timelines = timelines
        self._find = find
        self._found: Storages | None = None
        self._offloader = Offloader(mesh.device, host, self._storages)
        self._is_cuda = mesh.device.type == "cuda"
        self._moves_any = any(plan.tenants[t] for t in set(Tenant) - plan.residents)
        self._running: list[Moved] = []
        self._ended: list[Moved] = []
        self._background = ThreadPoolExecutor(1)
        self._freeing: Future[None] | None = None
        self._exposed_s = 0.0
        self.phase = "train"

    def enter(self, phase: str) -> None:
        """Bring the device to `phase`. A phase entered twice moves nothing.

        From train to rollout leads through sync: the engine's weights are gone while it sleeps.
        """
        with self._exposed():
            self._settle()
            if phase == "rollout" and self._rollout.state not in (EngineState.WEIGHTS_LOADED, EngineState.READY):
                raise RuntimeError(f"cannot enter rollout: the engine is {self._rollout.state.value}; sync first")
            self._report()
            if self.phase == "train":
                self._found = None
            if self._moves_any and self.phase in ("train", "reference") and self.phase != phase:
                self._empty_cache()  # activations; before copies start, since it waits for all that runs
            wanted = PHASES[phase] | self._plan.residents
            if Tenant.ENGINE_WEIGHTS in wanted:
                self._policy_makes_way(wanted)
            else:
                self._engine_makes_way(wanted)
            self.phase = phase
        self._write_timeline()
        if phase == "rollout" and self._offloader.is_leaving:
            self._freeing = self._background.submit(self._free)

    @contextlib.contextmanager
    def _exposed(self) -> Iterator[None]:
        """What the step waits for: the timeline has it by change of phase, and the metrics its sum."""
        start = time.perf_counter()
        with self._metrics.timed("swap"):
            yield
        self._exposed_s += time.perf_counter() - start

    def _free(self) -> None:
        """While the engine samples: wait for the copies out, and give their memory to the driver."""
        if self._is_cuda:
            torch.cuda.set_device(self._mesh.device)  # a thread begins on the first one
        self._offloader.finish_leaving()
        self._empty_cache()  # torch would keep it
        self._write_timeline()

    def _settle(self) -> None:
        """No more moves behind this thread's back; raises what went wrong there."""
        if self._freeing:
            freeing, self._freeing = self._freeing, None
            freeing.result()

    def _policy_makes_way(self, wanted: Collection[Tenant]) -> None:
        """Into sync or rollout. Where the engine's memory is free already, the copies out go on behind it."""
        weights, kv_cache = (self._engine_bytes(t) for t in (Tenant.ENGINE_WEIGHTS, Tenant.KV_CACHE))
        if self._rollout.state is EngineState.ASLEEP and self._fits(weights):
            self._rollout.wake_weights()  # first: mapping memory waits for copies that run
        self._leave([t for t in MOVABLE if t not in wanted])
        self._enter([t for t in MOVABLE if t in wanted])
        if self._rollout.state is EngineState.ASLEEP:
            self._make_room(weights)
            self._rollout.wake_weights()
        if Tenant.KV_CACHE in wanted and self._rollout.state is EngineState.WEIGHTS_LOADED:
            self._make_room(kv_cache)
            self._rollout.wake_kv_cache()

    def _engine_makes_way(self, wanted: Collection[Tenant]) -> None:
        """Into reference or train. Where there is room already, what forward needs starts back before the engine is
        asleep. Not more: vLLM's sleep waits for all that runs on the device."""
        self._leave([t for t in MOVABLE if t not in wanted])
        self._offloader.finish_leaving()
        entering = [t for t in MOVABLE if t in wanted]
        first = [t for t in entering if t not in STEP_ONLY]
        away = self._offloader.bytes_away(first)
        if away and self._rollout.state is not EngineState.ASLEEP:
            self._empty_cache()  # before the copies start, and so that the engine's sleep finds nothing to empty
            if self._fits(away):
                self._start_entering(first)
        self._rollout.sleep()
        self._enter(entering)

    def wait_for_step(self) -> None:
        """Masters and moments are back when this returns: the optimizer step may use them."""
        self._settle()
        with self._exposed():
            self._offloader.wait(STEP_ONLY)

    @contextlib.contextmanager
    def holding(self, tenants: Collection[Tenant]) -> Iterator[None]:
        """Bring these to the device beside what is there, for a checkpoint or an export; they leave again after it.

        Where they do not fit beside the engine on every rank, it sleeps first, and needs a sync afterwards. Collective.
        """
        with self._exposed():
            self._settle()
            away = self._offloader.bytes_away(tenants)
            if not self._mesh.all_true(not away or self._fits(away)):
                self._offloader.finish_leaving()
                self._rollout.sleep()
                self.phase = "train" if self.phase == "rollout" else self.phase
            self._enter([t for t in MOVABLE if t in tenants])
            self._offloader.wait(tenants)
        yield
        with self._exposed():
            self._leave([t for t in tenants if t not in PHASES[self.phase] | self._plan.residents])
            self._offloader.finish_leaving()
            self._empty_cache()

    def explain(self, error: BaseException) -> str | None:
        """What to know and to change where memory ran out; None for another error."""
        if not (isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "out of memory" in str(error)):
            return None
        there = {t.value: size for t, size in self._offloader.bytes_on_device().items() if size}
        there |= {name: size for name, size in self._engine_there().items() if size}
        listed = ", ".join(f"{name} {size / GIB:.2f}" for name, size in there.items()) or "nothing"
        free = ""
        if self._is_cuda:
            free_bytes, total_bytes = torch.cuda.mem_get_info(self._mesh.device)
            free = f"; the driver has {free_bytes / GIB:.2f} of {total_bytes / GIB:.2f} GiB free"
        return (f"out of memory in phase {self._mesh.phase} ({self.phase}): on the device are, in GiB, {listed}{free}. "
                f"What helps: {self._plan.remedies[self.phase]}. The error was: {error}")

    def close(self) -> None:
        """No more follows."""
        self._settle()
        self._background.shutdown()
        for timeline in self._timelines:
            timeline.close()

    def _storages(self) -> Storages:
        """As they were when training ended: they come and go in no other phase, and finding them takes 20 ms."""
        if self._found is None:
            self._found = self._find()
        return self._found

    def _leave(self, tenants: Collection[Tenant]) -> None:
        if (moved := self._offloader.leave(tenants)).tenants:
            self._running.append(moved)

    def _enter(self, tenants: Sequence[Tenant]) -> None:
        """Start bringing them; all but what the optimizer step alone needs is there on return."""
        away = self._offloader.bytes_away(tenants)
        if away:
            self._empty_cache()  # into segments of their own: a part of a cached one would keep all of it
            self._make_room(away)
        self._start_entering(tenants)
        self._offloader.wait([t for t in tenants if t not in STEP_ONLY])

    def _start_entering(self, tenants: Sequence[Tenant]) -> None:
        if (moved := self._offloader.enter(tenants)).tenants:
            self._running.append(moved)

    def _make_room(self, num_bytes: int) -> None:
        """Free what leaves, and torch's cache, where the driver has not this much already."""
        if not self._fits(num_bytes):
            self._offloader.finish_leaving()
            self._empty_cache()

    def _fits(self, num_bytes: int) -> bool:
        return not self._is_cuda or torch.cuda.mem_get_info(self._mesh.device)[0] >= num_bytes + SLACK_BYTES

    def _empty_cache(self) -> None:
        if self._is_cuda:
            torch.cuda.empty_cache()  # the driver, and so vLLM's pool, sees torch's cache as taken

    def _engine_bytes(self, tenant: Tenant) -> int:
        """What it takes when it is there."""
        return self._rollout.pool_bytes("kv_cache" if tenant is Tenant.KV_CACHE else "weights")

    def _engine_there(self) -> dict[str, int]:
        """Name -> bytes of what the engine has on the device now."""
        always = {ENGINE_ALWAYS: size} if (size := self._rollout.always_bytes) else {}
        return always | {t.value: self._engine_bytes(t) for t in sorted(ENGINE, key=list(Tenant).index)
                         if self._is_awake(t)}

    def _is_awake(self, tenant: Tenant) -> bool:
        awake = {EngineState.WEIGHTS_AWAKE, EngineState.WEIGHTS_LOADED, EngineState.HALF_LOADED, EngineState.READY}
        return self._rollout.state in (awake if tenant is Tenant.ENGINE_WEIGHTS else {EngineState.READY})

    def _report(self) -> None:
        """Memory in use at the end of a phase in GiB, by the driver or of this process, and the moves that ended."""
        phase = self.phase
        if self._is_cuda:
            # Of what sleeps too, torch says that it is allocated.
            asleep = sum(self._engine_bytes(t) for t in ENGINE if not self._is_awake(t))
            self._metrics.maximum(f"memory/{phase}_peak_allocated_gib",
                                  (torch.cuda.max_memory_allocated(self._mesh.device) - asleep) / GIB)
            torch.cuda.reset_peak_memory_stats(self._mesh.device)
        self._metrics.maximum(f"memory/{phase}_gib", used_bytes(self._mesh.device) / GIB)
        self._ended = [move for move in self._running if move.is_done()]  # one that still runs would be waited for
        self._running = [move for move in self._running if move not in self._ended]
        for move in self._ended:
            self._metrics.total(f"perf/swap_{move.direction}_gib", move.copied_bytes / GIB / self._mesh.world_size)
            self._metrics.total(f"timing/swap_copies_{move.direction}", move.seconds() / self._mesh.world_size)

    def _write_timeline(self) -> None:
        exposed_s, self._exposed_s = self._exposed_s, 0.0
        for timeline in self._timelines:
            line: dict[str, Any] = {"time": round(time.time(), 4), "phase": self.phase,
                                    "used_gib": used_bytes(self._mesh.device) / GIB, "exposed_s": round(exposed_s, 4)}
            tenants = {t.value: size for t, size in self._offloader.bytes_on_device().items()} | self._engine_there()
            line["tenants_gib"] = {name: size / GIB for name, size in tenants.items()}
            line["moves"] = [{"direction": m.direction, "gib": {t.value: n / GIB for t, n in m.tenants.items()},
                              "seconds": m.seconds(), "gb_per_s": m.copied_bytes / 1e9 / m.seconds()}
                             for m in self._ended if m.copied_bytes]
            timeline.write(json.dumps(line) + "\n")
            timeline.flush()
