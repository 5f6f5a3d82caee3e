"""Sharded weights on several hosts: handles within a host, and each byte of another host brought over once.

The ranks at one place of each host, the first of each say, gather their shards among themselves, a bucket at a time,
into a buffer that the other ranks of the host read through its handle. A collective over all ranks would bring every
rank the shards of its own host too, and the whole of the others'.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl import handles
from spmd_rl.handles import Handle
from spmd_rl.load_plan import Span, Weight
from spmd_rl.mesh import Mesh
from spmd_rl.offload import bytes_of
from spmd_rl.transports import Ipc, Lies, Offer, put_together, synchronize

ALIGNMENT = 16  # bytes, of a shard in a buffer
# Its name from torch 2.13 on, and before.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Bucket:
    """Neighbouring weights, and where a rank's shard of each lies in its row of a buffer."""

    weights: tuple[Weight, ...]
    offsets: tuple[int, ...]
    """In bytes."""
    num_bytes: int
    """Of a row."""


@dataclass(frozen=True)
class StagedOffer(Offer):
    """With the handles of the two buffers, which lie in one storage."""

    staging: list[list[Handle]]


class BetweenHosts(Ipc):
    """Ipc among the ranks of a host, which have as many ranks each; gathers by bucket between hosts."""

    def __init__(self, mesh: Mesh, held: Callable[[], Sequence[Weight]], stays: bool, bucket_bytes: int) -> None:
        """bucket_bytes: of whole weights that are gathered at once; a larger weight is alone. Collective."""
        super().__init__(mesh, held, True, stays)
        self._bucket_bytes = bucket_bytes
        self._ranks = by_host(mesh.all_gather(mesh.host))
        own_rank = mesh.mine(range(mesh.world_size))
        self._host = next(number for number, ranks in enumerate(self._ranks) if own_rank in ranks)
        self._column = self._ranks[self._host].index(own_rank)
        columns = [sorted(ranks) for ranks in zip(*self._ranks)]  # a group has its ranks, and a gather its rows, so
        self._row = {rank: row for ranks in columns for row, rank in enumerate(ranks)}
        # Every rank makes every group, in the same order.
        self._across = [dist.new_group(ranks) for ranks in columns][self._column]
        self._within = [dist.new_group(ranks, backend="gloo") for ranks in self._ranks][self._host]
        self._cut: Sequence[Weight] = ()
        """The weights that the buckets are of."""
        self._buckets: list[Bucket] = []
        self._staging = torch.empty(0)
        self._peers: dict[int, Tensor] = {}
        self._elsewhere: dict[int, dict[str, Lies]] = {}

    def offer(self) -> StagedOffer:
        """As Ipc, with two buffers for what comes from other hosts."""
        self._peers = {}  # of a sync that failed
        offer = super().offer()
        assert offer is not None, "handles are exchanged"
        if self._mine is not self._cut:
            self._cut, self._buckets = self._mine, buckets(self._mine, self._mesh.world_size, self._bucket_bytes)
        size = max(bucket.num_bytes for bucket in self._buckets)
        self._staging = torch.empty(2, len(self._ranks) * size, dtype=torch.uint8, device=self._mesh.device)
        sent = [[handles.export(self._staging.untyped_storage(), self._place)] if reads else []
                for reads in self._readers]
        return StagedOffer(offer.place, offer.layout, offer.handles, sent)

    def weights(self, offers: Sequence[Offer | None]) -> Iterator[Weight]:
        """From this rank's memory, its host's ranks', and the buffers. Collective: all ranks take them to the end."""
        self._take_all(offers)
        here = self._ranks[self._host]
        for rank, offer in enumerate(offers):
            assert isinstance(offer, StagedOffer), "every rank stages"
            if rank in here and rank != here[self._column] and rank not in self._peers:
                storage, = (handles.open_handle(handle, self._place) for handle in self._mesh.mine(offer.staging))
                self._peers[rank] = bytes_of(storage).view_as(self._staging)
            if rank not in here and offer.layout is not None:
                self._elsewhere[rank] = {lies.name: lies for lies in offer.layout}
        found = self._spans_here()
        self._meet()  # nobody reads what an earlier pass left in the first buffer
        for number, bucket in enumerate(self._buckets):
            # Two buffers: a rank that fills one again has met all readers of it at the barrier of the other.
            self._fill(number % 2, bucket)
            for weight, offset in zip(bucket.weights, bucket.offsets):
                spans = [*found[weight.name], *self._spans_elsewhere(number % 2, bucket, weight, offset)]
                yield put_together(weight, spans)

    def _fill(self, buffer: int, bucket: Bucket) -> None:
        row = torch.zeros(bucket.num_bytes, dtype=torch.uint8, device=self._mesh.device)
        for weight, offset in zip(bucket.weights, bucket.offsets):
            for span in weight.spans:  # a shard is one
                row[offset:offset + span.flat.nbytes].view(weight.dtype).copy_(span.flat)
        rows = self._rows(self._staging, buffer, bucket)
        _gather(rows.view(-1), row, group=self._across)
        self._meet()

    def _meet(self) -> None:
        """This host's ranks have written and read all that they were to when this returns."""
        synchronize(self._mesh.device)  # no event orders the streams of processes
        dist.all_reduce(torch.zeros(1), group=self._within)  # over gloo, as a barrier of processes

    def _rows(self, staging: Tensor, buffer: int, bucket: Bucket) -> Tensor:
        """One a host, in the order of the ranks they come from."""
        return staging[buffer, :len(self._ranks) * bucket.num_bytes].view(len(self._ranks), bucket.num_bytes)

    def _spans_elsewhere(self, buffer: int, bucket: Bucket, weight: Weight, offset: int) -> Iterator[Span]:
        here = self._ranks[self._host]
        for host, ranks in enumerate(self._ranks):
            for column, rank in enumerate(ranks):
                if host != self._host and (lies := self._elsewhere[rank].get(weight.name)):
                    staging = self._staging if column == self._column else self._peers[here[column]]
                    row = self._rows(staging, buffer, bucket)[self._row[rank]]
                    end = offset + lies.count * weight.dtype.itemsize
                    yield Span(lies.start, row[offset:end].view(weight.dtype))

    def release(self) -> None:
        """As Ipc, and the buffers go."""
        synchronize(self._mesh.device)  # this rank's reads
        self._peers = {}
        super().release()
        self._staging = torch.empty(0)
        handles.release()


def by_host(hosts: Sequence[str]) -> list[list[int]]:
    """Each host's ranks, by the host of each rank; hosts in order of their first."""
    found: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return list(found.values())


def buckets(weights: Sequence[Weight], world_size: int, bucket_bytes: int) -> list[Bucket]:
    """In order, at most so many bytes of whole weights together; the same on every rank, whatever it holds of them."""
    found: list[Bucket] = []
    chosen: list[Weight] = []
    offsets: list[int] = []
    size = 0

    def close() -> None:
        if chosen:
            found.append(Bucket(tuple(chosen), tuple(offsets), size))

    for weight in weights:
        shard = -(-math.prod(weight.shape) // world_size) * weight.dtype.itemsize
        padded = -(-shard // ALIGNMENT) * ALIGNMENT
        if (size + padded) * world_size > bucket_bytes:
            close()
            chosen, offsets, size = [], [], 0
        chosen.append(weight)
        offsets.append(size)
        size += padded
    close()
    return found
