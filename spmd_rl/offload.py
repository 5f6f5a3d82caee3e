"""Takes whole storages off the device and back, leaving every view of them valid.

A storage that leaves is copied to host memory and resized to 0 bytes; one that returns is resized back and
filled. Tensors over it, DeepSpeed's flat buffers and their slices among them, never notice, but its address
changes: storage that others hold by address (a CUDA graph, a view of vLLM's) must not be given to the mover.
Host memory is pinned once and kept. Copies run on streams of their own; sources are found anew each time, since
DeepSpeed makes and drops buffers as it goes.
"""

import contextlib
import enum
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

CHUNK_BYTES = 2**30  # torch rounds a pinned block up to a power of two, which would waste up to half of it
COPY_BYTES = 2**26
PLAIN = {int, float, bool, str, bytes, type(None)}  # lead nowhere
SMALL_BYTES = 4096  # counters and norms stay where they are


class Tenant(enum.Enum):
    """What takes memory on the device."""

    WEIGHTS = "weights"
    MASTERS = "fp32 masters"
    MOMENTS = "moments"
    GRADIENTS = "gradients"
    SCRATCH = "communication buffers"
    REFERENCE = "reference"
    ENGINE_WEIGHTS = "engine weights"
    KV_CACHE = "KV cache"


Storages = Mapping[Tenant, Sequence[torch.UntypedStorage]]


class HostMemory:
    """Chunks of host memory, pinned where there is a GPU, seen as one range of bytes."""

    def __init__(self, pinned: bool, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._pinned, self._chunk_bytes = pinned, chunk_bytes
        self._chunks: list[Tensor] = []
        self._free: list[tuple[int, int]] = []  # (start, end), in order, never touching
        self._growth: Thread | None = None
        self._error: BaseException | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all chunks."""
        return len(self._chunks) * self._chunk_bytes

    def grow_in_background(self, num_bytes: int) -> None:
        """Have at least so many bytes, made by a thread: pinning runs at 2 GB/s."""
        self._growth = Thread(target=self._grow_guarded, args=(num_bytes,), daemon=True)
        self._growth.start()

    def take(self, num_bytes: int) -> int:
        """Start of a free range; grows where there is none. Raises MemoryError where the host has no more."""
        self._join()
        for i, (start, end) in enumerate(self._free):
            if end - start >= num_bytes:
                self._free[i:i + 1] = [(start + num_bytes, end)] if end - start > num_bytes else []
                return start
        last_start, last_end = self._free[-1] if self._free else (0, 0)
        at_end = last_end - last_start if self._free and last_end == self.num_bytes else 0
        self._grow(self.num_bytes + num_bytes - at_end)
        return self.take(num_bytes)

    def give_back(self, start: int, num_bytes: int) -> None:
        """Make a range free again."""
        merged: list[tuple[int, int]] = []
        for low, high in sorted([*self._free, (start, start + num_bytes)]):
            if merged and merged[-1][1] == low:
                merged[-1] = (merged[-1][0], high)
            else:
                merged.append((low, high))
        self._free = merged

    def pieces(self, start: int, num_bytes: int) -> Iterator[Tensor]:
        """The range as byte tensors, one a chunk that it touches."""
        while num_bytes:
            number, offset = divmod(start, self._chunk_bytes)
            length = min(num_bytes, self._chunk_bytes - offset)
            yield self._chunks[number][offset:offset + length]
            start, num_bytes = start + length, num_bytes - length

    def _grow_guarded(self, num_bytes: int) -> None:
        try:
            self._grow(num_bytes)
        except BaseException as error:  # raised again where memory is taken
            self._error = error

    def _grow(self, num_bytes: int) -> None:
        while self.num_bytes < num_bytes:
            try:
                chunk = torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=self._pinned)
            except RuntimeError as error:
                raise MemoryError(f"no host memory to take training states to: {self.num_bytes / 2**30:.1f} GiB are "
                                  f"pinned on this rank and {num_bytes / 2**30:.1f} GiB needed ({error}); give the job "
                                  "more host memory or set memory.swap never") from error
            start = self.num_bytes
            self._chunks.append(chunk)
            self.give_back(start, self._chunk_bytes)

    def _join(self) -> None:
        if self._growth:
            self._growth.join()
            self._growth = None
        if self._error:
            raise self._error


class _State(enum.Enum):
    ON_DEVICE = 0
    LEAVING = 1  # whole on the device, a copy to the host under way
    ON_HOST = 2
    RETURNING = 3  # a copy to the device under way


@dataclass
class _Entry:
    """A storage that the mover has moved at least once."""

    tenant: Tenant
    ref: StorageWeakRef
    num_bytes: int
    state: _State = _State.ON_DEVICE
    storage: torch.UntypedStorage | None = None
    """Held only while its bytes are the mover's to keep."""
    start: int | None = None
    """Its range of host memory; None where it has no bytes worth keeping."""
    is_zero: bool = False
    """All bytes were 0 when it left: nothing was copied."""
    event: Any = None


@dataclass
class Moved:
    """What one call moved."""

    direction: str
    tenants: dict[Tenant, int] = field(default_factory=dict)
    """Bytes of each, also of zeros and of scratch, which need no copy."""
    copied_bytes: int = 0
    started: Any = None
    ended: Any = None

    def is_done(self) -> bool:
        """Whether its copies are over."""
        return isinstance(self.ended, float) or self.ended.query()

    def seconds(self) -> float:
        """Of the copies, on their own stream."""
        if isinstance(self.started, float):
            return self.ended - self.started
        self.ended.synchronize()  # no time before its event
        return self.started.elapsed_time(self.ended) / 1000


class Offloader:
    """Moves tenants between device and host. Each call may be repeated; one that failed is made good by the next."""

    def __init__(self, device: torch.device, host: HostMemory, find: Callable[[], Storages]) -> None:
        """find: the storages of each tenant as they are now."""
        self._device, self._host, self._find = device, host, find
        self._entries: dict[int, _Entry] = {}
        self._leaving: deque[_Entry] = deque()
        is_cuda = device.type == "cuda"
        self._out: Any = torch.cuda.Stream(device) if is_cuda else None
        self._in: Any = torch.cuda.Stream(device) if is_cuda else None

    def leave(self, tenants: Collection[Tenant]) -> Moved:
        """Start copying them to the host; `finish_leaving` frees the device. What is gone already is no work.

        Nothing may write to them meanwhile.
        """
        movable = self._movable(tenants) if tenants else []  # first: a walk that takes 20 ms is no copying
        moved = self._begin("out", self._out)
        for tenant, storage in movable:
            entry = self._entry(tenant, storage)
            if entry.state is _State.ON_HOST:
                storage.resize_(0)  # a return that failed half-way
            elif entry.state is not _State.LEAVING:
                self._wait(entry)
                self._copy_out(storage, entry, moved)
        return self._end(moved, self._out)

    @property
    def is_leaving(self) -> bool:
        """Whether something left that is not freed yet."""
        return bool(self._leaving)

    def finish_leaving(self) -> None:
        """Wait for what leaves, and free its device memory."""
        while self._leaving:
            entry = self._leaving[0]
            if entry.state is _State.LEAVING:  # else it was called back
                if entry.event:
                    entry.event.synchronize()  # the copy still reads what is freed next
                assert entry.storage is not None, "a leaving storage is held"
                entry.storage.resize_(0)
                entry.state = _State.ON_HOST
            self._leaving.popleft()

    def enter(self, tenants: Sequence[Tenant]) -> Moved:
        """Start bringing them back, in this order; `wait` before they are used. Device memory for all of them is
        taken before it returns."""
        entries = [entry for tenant in tenants for entry in self._entries.values() if entry.tenant is tenant]
        for entry in entries:
            if entry.state is _State.LEAVING:
                entry.state, entry.storage = _State.ON_DEVICE, None  # still whole where it is
            elif entry.state is _State.ON_HOST:
                assert entry.storage is not None, "a storage on the host is held"
                entry.storage.resize_(entry.num_bytes)
        moved = self._begin("in", self._in)
        for entry in entries:
            if entry.state is _State.ON_HOST:
                self._copy_in(entry, moved)
        return self._end(moved, self._in)

    def wait(self, tenants: Collection[Tenant]) -> None:
        """The host waits until these are back whole; work queued afterwards may use them."""
        for entry in self._entries.values():
            if entry.tenant in tenants:
                self._wait(entry)

    def forget_all(self) -> None:
        """Give the host memory back; all are on the device."""
        assert all(entry.state is _State.ON_DEVICE for entry in self._entries.values()), "some are still away"
        for key in list(self._entries):
            self._forget(key)

    def bytes_away(self, tenants: Collection[Tenant]) -> int:
        """Device memory that bringing these back takes."""
        return sum(entry.num_bytes for entry in self._entries.values()
                   if entry.tenant in tenants and entry.state is _State.ON_HOST)

    def bytes_on_device(self) -> dict[Tenant, int]:
        """Of each tenant, as it is now."""
        return {tenant: sum(s.nbytes() for s in storages if s.device.type == self._device.type)
                for tenant, storages in self._find().items()}

    def _movable(self, tenants: Collection[Tenant]) -> list[tuple[Tenant, torch.UntypedStorage]]:
        """Storages on the device or known, as they are now; what is no more is forgotten."""
        found = self._find()
        alive = {storage._cdata for storages in found.values() for storage in storages}
        for key, entry in list(self._entries.items()):
            if entry.ref.expired() or key not in alive and entry.state is not _State.LEAVING:
                self._wait(entry)
                self._forget(key)
        return [(tenant, storage) for tenant, storages in found.items() if tenant in tenants for storage in storages
                if storage.device.type == self._device.type and _can_resize(storage)
                and (storage.nbytes() >= SMALL_BYTES or storage._cdata in self._entries)]

    def _forget(self, key: int) -> None:
        entry = self._entries.pop(key)
        if entry.start is not None:
            self._host.give_back(entry.start, entry.num_bytes)

    def _entry(self, tenant: Tenant, storage: torch.UntypedStorage) -> _Entry:
        entry = self._entries.get(storage._cdata)
        if entry and entry.state is _State.ON_DEVICE and entry.num_bytes != storage.nbytes():  # resized by its owner
            self._forget(storage._cdata)
            entry = None
        if not entry:
            entry = self._entries[storage._cdata] = _Entry(tenant, StorageWeakRef(storage), storage.nbytes())
        return entry

    def _copy_out(self, storage: torch.UntypedStorage, entry: _Entry, moved: Moved) -> None:
        view = bytes_of(storage)
        entry.is_zero = entry.tenant is Tenant.GRADIENTS and _is_zero(view)
        if entry.tenant is not Tenant.SCRATCH and not entry.is_zero:
            if entry.start is None:
                entry.start = self._host.take(entry.num_bytes)
            with _on(self._out):
                # In parts, so that the engine's own small copies to the host get between them.
                parts = (part for piece in self._host.pieces(entry.start, entry.num_bytes)
                         for part in piece.split(COPY_BYTES))
                _copy(parts, view, to_host=True)
            moved.copied_bytes += entry.num_bytes
        entry.event = self._out.record_event() if self._out else None
        entry.state, entry.storage = _State.LEAVING, storage
        self._leaving.append(entry)
        moved.tenants[entry.tenant] = moved.tenants.get(entry.tenant, 0) + entry.num_bytes

    def _copy_in(self, entry: _Entry, moved: Moved) -> None:
        assert entry.storage is not None, "a storage on the host is held"
        view = bytes_of(entry.storage)
        with _on(self._in):
            if entry.is_zero:
                view.zero_()
            elif entry.tenant is not Tenant.SCRATCH:
                assert entry.start is not None, "a storage on the host has its range"
                _copy(self._host.pieces(entry.start, entry.num_bytes), view, to_host=False)
                moved.copied_bytes += entry.num_bytes
        entry.event = self._in.record_event() if self._in else None
        entry.state = _State.RETURNING
        moved.tenants[entry.tenant] = moved.tenants.get(entry.tenant, 0) + entry.num_bytes

    def _wait(self, entry: _Entry) -> None:
        if entry.state is _State.RETURNING:
            if entry.event:
                entry.event.synchronize()  # the host, not a stream: what follows may be on any
            entry.state, entry.storage = _State.ON_DEVICE, None

    def _begin(self, direction: str, stream: Any) -> Moved:
        if not stream:
            return Moved(direction, started=time.perf_counter())
        # What writes the sources comes first, and what still uses the memory that targets were given.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        return Moved(direction, started=stream.record_event(torch.cuda.Event(enable_timing=True)))

    def _end(self, moved: Moved, stream: Any) -> Moved:
        moved.ended = stream.record_event(torch.cuda.Event(enable_timing=True)) if stream else time.perf_counter()
        return moved


def _can_resize(storage: torch.UntypedStorage) -> bool:
    """Not where it is mapped from a file, or from shared memory: torch says that it can, and would end the process."""
    return storage.resizable() and not (storage.device.type == "cpu" and storage.is_shared())


def _copy(pieces: Iterable[Tensor], view: Tensor, to_host: bool) -> None:
    """Between pieces of host memory and a device's bytes, in order."""
    place = 0
    for host in pieces:
        device = view[place:place + len(host)]
        target, source = (host, device) if to_host else (device, host)
        target.copy_(source, non_blocking=True)
        place += len(host)


def _on(stream: Any) -> Any:
    return torch.cuda.stream(stream) if stream else contextlib.nullcontext()


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """A view of all of it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def _is_zero(view: Tensor) -> bool:
    """All bits, so that -0.0 does not count; a read at the device's own speed is cheaper than a copy to the host."""
    whole = len(view) // 8 * 8
    return not bool(view[:whole].view(torch.int64).any()) and not bool(view[whole:].any())


def reachable_storages(roots: Iterable[Any], packages: tuple[str, ...]) -> list[torch.UntypedStorage]:
    """Storages of all tensors that roots lead to, through containers, tensors' own attributes and gradients, and
    objects of classes of these packages; each once."""
    seen: dict[int, Any] = {}
    found: dict[int, torch.UntypedStorage] = {}
    queue = deque(roots)
    while queue:
        item = queue.popleft()
        if item.__class__ in PLAIN or id(item) in seen:
            continue
        seen[id(item)] = item  # held, so that no id is used again
        if isinstance(item, Tensor):
            if item.device.type != "meta":
                storage = item.untyped_storage()
                found.setdefault(storage._cdata, storage)
            if item.is_leaf and item.grad is not None:
                queue.append(item.grad)
            queue.extend(vars(item).values())
        elif isinstance(item, dict):
            queue.extend(item.keys())
            queue.extend(item.values())
        elif isinstance(item, (list, tuple, set, deque)):
            queue.extend(item)
        elif hasattr(item, "__dict__") and type(item).__module__.split(".")[0] in packages:
            queue.extend(vars(item).values())
    return list(found.values())
