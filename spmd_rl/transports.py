"""How a rank's engine gets at weights that other ranks hold: by handles of their storages, or gathered by bucket.

Every transport makes, once a sync, an offer to the other ranks, which travels with the manifest, and then gives whole
weights; the rank's own memory is never copied on the way.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from spmd_rl import handles
from spmd_rl.handles import Handle, Place
from spmd_rl.load_plan import Span, Weight
from spmd_rl.mesh import Mesh
from spmd_rl.offload import bytes_of


class Transport(Protocol):
    """What WeightSync needs of one."""

    name: str

    def offer(self) -> Any:
        """What the other ranks need to know this time."""

    def weights(self, offers: Sequence[Any]) -> Iterator[Weight]:
        """All weights, whole, in the policy's order, each good until the next is asked for."""

    def release(self) -> None:
        """All have been read. Collective."""


class Shared:
    """The engine's parameters are views of the policy's storage: there is nothing to bring."""

    name = "shared"

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        """parameters: the policy's, all of them."""
        self._parameters = parameters
        self._addresses = self._now()

    def offer(self) -> None:
        """Nothing. Raises RuntimeError where the policy's weights are elsewhere than when the engine took them."""
        if self._now() != self._addresses:
            raise RuntimeError("weight sync refused: the policy's weights have moved, and the engine's parameters are "
                               "views of where they were")

    def weights(self, offers: Sequence[Any]) -> Iterator[Weight]:
        """None."""
        return iter(())

    def release(self) -> None:
        """Nothing is held."""

    def _now(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self._parameters]


class Gather:
    """Whole tensors from collectives of DeepSpeed's, a bucket at a time."""

    name = "gather"

    def __init__(self, stream: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
        """stream: (name, whole tensor), collective over all ranks."""
        self._stream = stream

    def offer(self) -> None:
        """Nothing."""

    def weights(self, offers: Sequence[Any]) -> Iterator[Weight]:
        """All ranks have to take them to the end."""
        for name, tensor in self._stream():
            yield Weight.of(name, tensor)

    def release(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class Lies:
    """Where a rank has elements [start, start + count) of a weight."""

    name: str
    start: int
    count: int
    storage: int
    """Which of the rank's storages."""
    offset: int
    """In elements, in the storage."""


@dataclass(frozen=True)
class Offer:
    """What a rank tells the others in a sync."""

    place: Place
    layout: tuple[Lies, ...] | None
    """None where it is the one that was sent before."""
    handles: list[list[Handle]] | None
    """For each rank, of each storage, none for those that cannot open any; None where they have not moved since the
    others opened them."""


class Ipc:
    """This rank's own storages, and those of peers on this host through handles: whole storages, not weights."""

    name = "ipc"

    def __init__(self, mesh: Mesh, held: Callable[[], Sequence[Weight]], exchanges: bool, stays: bool) -> None:
        """held: this rank's parts of all weights, where they are now. exchanges: whether handles are passed around;
        else every rank has all it needs. stays: whether the storages never move: handles are then sent once.
        Collective."""
        self._mesh, self._held, self._exchanges = mesh, held, exchanges
        self._readers = readers(mesh, mesh.all_gather(mesh.host)) if exchanges else []
        self._place = Place.here(mesh.device, mesh.host)
        # The mover leaves shared memory alone.
        self._stays = stays or mesh.device.type == "cpu"
        self._mine: Sequence[Weight] = []
        self._storages: Sequence[torch.UntypedStorage] = []
        self._layout: tuple[Lies, ...] = ()
        self._whole: list[Weight] = []
        """Of the last sync, from this rank's and peers' memory; none where a part is not where it was."""
        self._sent_layout: tuple[Lies, ...] | None = None
        self._sent_addresses: list[int] = []
        self._layouts: dict[int, tuple[Lies, ...]] = {}
        self._mapped: dict[int, list[torch.UntypedStorage]] = {}

    def offer(self) -> Offer | None:
        """Handles of this rank's storages, once they are written."""
        mine = self._held()
        if mine is not self._mine:
            self._mine, self._whole = mine, []
            self._storages, self._layout = lay_out(mine)
        if not self._exchanges:
            return None
        if not self._stays:
            self._mapped, self._whole = {}, []  # what a sync that failed left open has moved since
        synchronize(self._mesh.device)  # peers read at once, and no event of ours orders their streams
        storages, layout = self._storages, self._layout
        sent_layout = layout if layout != self._sent_layout else None
        sent = None
        if not (self._stays and self._sent_addresses):
            sent = [[handles.export(storage, self._place) for storage in storages if reads] for reads in self._readers]
            self._sent_addresses = [storage.data_ptr() for storage in storages]
        elif sent_layout or self._sent_addresses != [storage.data_ptr() for storage in storages]:
            raise RuntimeError("weight sync refused: a storage of weights has moved since its handle was sent, and "
                               "peers would read what lies there now")
        self._sent_layout = layout
        return Offer(self._place, sent_layout, sent)

    def weights(self, offers: Sequence[Offer | None]) -> Iterator[Weight]:
        """From this rank's memory, and from its peers' what it has not."""
        self._take_all(offers)
        if not self._whole:
            found = self._spans_here()
            self._whole = [weight if is_whole(weight) else put_together(weight, found[weight.name])
                           for weight in self._mine]
        return iter(self._whole)

    def _spans_here(self) -> dict[str, list[Span]]:
        """By weight, what this rank has of it, and the peers whose storages are open."""
        found: dict[str, list[Span]] = {weight.name: list(weight.spans) for weight in self._mine}
        dtypes = {weight.name: weight.dtype for weight in self._mine}
        for rank, storages in self._mapped.items():
            for lies in self._layouts[rank]:
                found[lies.name].append(Span(lies.start, torch.empty(
                    0, dtype=dtypes[lies.name], device=storages[lies.storage].device).set_(
                        storages[lies.storage], lies.offset, (lies.count,), (1,))))
        return found

    def _take_all(self, offers: Sequence[Offer | None]) -> None:
        own_rank = self._mesh.mine(range(self._mesh.world_size))
        for rank, offer in enumerate(offers):
            if offer and rank != own_rank and offer.place.host == self._place.host:
                self._take(rank, offer)

    def _take(self, rank: int, offer: Offer) -> None:
        if offer.layout is not None:
            self._layouts[rank], self._whole = offer.layout, []
        if offer.handles is not None and rank not in self._mapped:
            self._whole = []
            self._mapped[rank] = [handles.open_handle(h, self._place) for h in self._mesh.mine(offer.handles)]
        if rank not in self._mapped or rank not in self._layouts:
            raise RuntimeError(f"weight sync refused: rank {rank} sent no handles, and none of its storages is open")

    def release(self) -> None:
        """Peers may write to their weights again when this returns, and move those that move."""
        if not self._exchanges:
            return
        synchronize(self._mesh.device)  # this rank's reads: their owners' streams do not wait for them
        if not self._stays:
            self._mapped, self._whole = {}, []
        self._mesh.barrier()  # all have read, and dropped what will move
        if not self._stays:
            handles.release()


def readers(mesh: Mesh, hosts: Sequence[str]) -> list[bool]:
    """For each rank, whether it opens this rank's handles. An export that nobody opens keeps its memory for good, also
    when its owner has let it go."""
    own_rank = mesh.mine(range(mesh.world_size))
    return [host == mesh.host and rank != own_rank for rank, host in enumerate(hosts)]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        # Not the whole device: masters on their way to the host take far longer.
        torch.cuda.current_stream(device).synchronize()  # the host: other processes are told by it


def put_together(weight: Weight, spans: Sequence[Span]) -> Weight:
    """The weight whole. Raises RuntimeError where the spans are not all of it, each element once."""
    whole = replace(weight, spans=sorted(spans, key=lambda span: span.start))
    if not is_whole(whole):
        raise RuntimeError(f"weight sync refused: of {weight.name}, {weight.shape}, the ranks hold (start, elements) "
                           f"{[(span.start, span.flat.numel()) for span in whole.spans]}")
    return whole


def is_whole(weight: Weight) -> bool:
    """Whether its spans are all of it, each element once."""
    ends = [0]
    for span in weight.spans:
        if span.start != ends[-1]:
            return False
        ends.append(span.start + span.flat.numel())
    return ends[-1] == math.prod(weight.shape)


def lay_out(weights: Sequence[Weight]) -> tuple[list[torch.UntypedStorage], tuple[Lies, ...]]:
    """The storages that hold these parts, each once, and where in them each lies."""
    numbers: dict[int, int] = {}
    storages: list[torch.UntypedStorage] = []
    lies = []
    for weight in weights:
        for span in weight.spans:
            storage = span.flat.untyped_storage()
            if storage._cdata not in numbers:
                numbers[storage._cdata] = len(storages)
                storages.append(storage)
            lies.append(Lies(weight.name, span.start, span.flat.numel(), numbers[storage._cdata],
                             int(span.flat.storage_offset())))
    return storages, tuple(lies)


def why_not_ipc(mesh: Mesh, held: Sequence[Weight], exchanges: bool) -> str | None:
    """What keeps handles from serving, on any rank; None where they do. Collective, and the same on all ranks.

    exchanges: also where each rank has all it needs.
    """
    place = Place.here(mesh.device, mesh.host)
    on_host = next((weight.name for weight in held for span in weight.spans
                    if span.flat.device.type != mesh.device.type), None)
    num_bytes = sum(storage.nbytes() for storage in lay_out(held)[0])
    ranks = mesh.all_gather((place.host, on_host, all(map(is_whole, held)), num_bytes))
    if any(name for _, name, _, _ in ranks):
        return "weights are kept on the host"
    if all(whole for _, _, whole, _ in ranks) and not exchanges:
        return None
    hosts = {host for host, *_ in ranks}
    numbers = sorted({sum(host == other for other, *_ in ranks) for host in hosts})
    if len(hosts) > 1 and not all(whole for _, _, whole, _ in ranks) and (len(numbers) > 1 or numbers == [1]):
        return f"weights are sharded over {len(hosts)} hosts of {' and '.join(map(str, numbers))} ranks"
    needed = sum(size for host, _, _, size in ranks if host == place.host)
    if len(hosts) > 1:
        needed += 2 * sum(size for _, _, _, size in ranks)  # BetweenHosts' buffers, at most
    reads = readers(mesh, [host for host, *_ in ranks])
    return next(filter(None, mesh.all_gather(_trial(mesh, place, needed, reads))), None)


def _trial(mesh: Mesh, place: Place, needed: int, reads: Sequence[bool]) -> str | None:
    """Why this rank cannot open a handle of each other rank of its host, or None."""
    own_rank = mesh.mine(range(mesh.world_size))
    value = torch.full((1,), own_rank, dtype=torch.int64, device=mesh.device)
    synchronize(mesh.device)
    reason, sent = None, None
    try:
        handles.check_room(place, needed)
        sent = [[handles.export(value.untyped_storage(), place)] if is_reader else [] for is_reader in reads]
    except (RuntimeError, OSError) as error:
        reason = f"rank {own_rank}: {error}"
    for rank, from_peer in enumerate(mesh.all_gather(sent)):
        if reason or not reads[rank] or not from_peer:
            continue
        try:
            storage, = (handles.open_handle(handle, place) for handle in mesh.mine(from_peer))
            seen = bytes_of(storage).view(torch.int64)[0].item()
            del storage
            if seen != rank:
                reason = f"rank {own_rank} reads {seen} in rank {rank}'s memory"
        except (RuntimeError, OSError) as error:
            reason = f"rank {own_rank} cannot open rank {rank}'s handle: {error}"
    mesh.barrier()  # all have dropped it
    handles.release()
    return reason
