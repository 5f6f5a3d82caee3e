"""Handles and transports: each rank gets whole weights from its own and its peers' memory, or a clear refusal."""

import dataclasses
import math
import os
import pickle
import subprocess
import sys
from collections import namedtuple

import pytest
import torch

from spmd_rl import handles
from spmd_rl.handles import Handle, Place, export, open_handle
from spmd_rl.load_plan import Span, Weight
from spmd_rl.transports import Ipc, Lies, Offer, Shared, is_whole, lay_out, why_not_ipc

CPU = torch.device("cpu")
HERE = Place("this", "cpu", os.getpid())
SHAPES = {"a": (5, 3), "b": (2,), "c": (4, 4), "d": (1,)}


class Ranks:
    """Ranks in one process: what they give to a collective is put together by hand."""

    def __init__(self, rank, world_size, host="this"):
        self.rank, self.world_size, self.host, self.device = rank, world_size, host, CPU
        self.barriers = 0

    def mine(self, parts):
        return parts[self.rank]

    def all_gather(self, value):
        return [value] * self.world_size

    def barrier(self):
        self.barriers += 1


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def shards_of(rank, world_size, made):
    """As ZeRO-3 holds them: equal parts of each weight in one flat buffer, the last padded, some without any of it."""
    sizes = {name: -(-math.prod(shape) // world_size) for name, shape in SHAPES.items()}
    flat = torch.full((sum(sizes.values()),), 77.0)
    held, place = [], 0
    for name, shape in SHAPES.items():
        start = rank * sizes[name]
        part = made[name].reshape(-1)[start:start + sizes[name]]
        flat[place:place + part.numel()] = part
        spans = [Span(start, flat[place:place + part.numel()])] if part.numel() else []
        held.append(Weight(name, shape, torch.float32, spans))
        place += sizes[name]
    return flat, held


class Job:
    """`world_size` ranks with Ipc, of one policy."""

    def __init__(self, world_size, sharded=True, stays=True):
        made = tensors()
        self.parts = [shards_of(rank if sharded else 0, world_size if sharded else 1, made)
                      for rank in range(world_size)]
        self.meshes = [Ranks(rank, world_size) for rank in range(world_size)]
        self.ranks = [Ipc(mesh, (lambda rank=rank: self.parts[rank][1]), True, stays)
                      for rank, mesh in enumerate(self.meshes)]
        for rank in self.ranks:
            rank._stays = stays

    def sync(self):
        offers = [rank.offer() for rank in self.ranks]
        found = [{w.name: w.whole(CPU).clone() for w in rank.weights(offers)} for rank in self.ranks]
        for rank in self.ranks:
            rank.release()
        return offers, found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("stays", [True, False])
def test_every_rank_gets_all_weights(world_size, stays):
    """From shards of any size, also of weights with fewer elements than ranks, in the policy's order, and those of now:
    a write to the shards is in the next sync."""
    job = Job(world_size, stays=stays)
    for step in range(3):
        made = tensors(step)
        for rank, (flat, held) in enumerate(job.parts):
            flat.copy_(shards_of(rank, world_size, made)[0])
        _, found = job.sync()
        for rank in found:
            assert list(rank) == list(SHAPES)
            assert all(torch.equal(rank[name], made[name]) for name in SHAPES)


def test_handles_are_of_storages_and_are_sent_once_where_nothing_moves():
    """One storage a rank, not one a weight; the second sync sends neither handles nor layout, and opens nothing."""
    job = Job(2)
    first, _ = job.sync()
    assert [[len(of_reader) for of_reader in offer.handles] for offer in first] == [[0, 1], [1, 0]]
    second, _ = job.sync()
    assert all(offer.handles is None and offer.layout is None for offer in second)
    moving = Job(2, stays=False)
    for offers, _ in (moving.sync(), moving.sync()):
        assert all(offer.handles for offer in offers)
    assert [mesh.barriers for mesh in moving.meshes] == [2, 2]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("stays", [True, False])
def test_each_export_is_opened_once(monkeypatch, world_size, stays):
    """CUDA keeps the memory of an export that nobody opens, also when its owner frees it: a shard a sync would be lost.
    The first sync asks for the weights twice."""
    exported, opened = [], []
    monkeypatch.setattr(handles, "export", lambda *args: exported.append(export(*args)) or exported[-1])
    monkeypatch.setattr(handles, "open_handle", lambda *args: opened.append(args[0]) or open_handle(*args))
    job = Job(world_size, stays=stays)
    for _ in range(3):
        offers = [rank.offer() for rank in job.ranks]
        for rank in job.ranks * 2:
            assert len(list(rank.weights(offers))) == len(SHAPES)
        for rank in job.ranks:
            rank.release()
    assert sorted(map(id, opened)) == sorted(map(id, exported))
    assert len(opened) == world_size * (world_size - 1) * (1 if stays else 3)


def test_ranks_of_other_hosts_get_no_handles():
    """They could not open any."""
    mesh = Ranks(1, 4)
    mesh.all_gather = lambda host: ["another", "this", "this", "another"]
    rank = Ipc(mesh, lambda: shards_of(1, 4, tensors())[1], True, True)
    assert [len(of_reader) for of_reader in rank.offer().handles] == [0, 0, 1, 0]


def test_nothing_is_read_from_what_a_failed_sync_left_open():
    """Weights that move: after a sync that ended in its middle the next one opens the new handles."""
    job = Job(2, stays=False)
    offers = [rank.offer() for rank in job.ranks]
    for rank in job.ranks:
        next(rank.weights(offers))  # and then something fails, and nobody comes to release
    made = tensors(1)
    job.parts = [shards_of(rank, 2, made) for rank in range(2)]
    _, found = job.sync()
    assert all(torch.equal(rank[name], made[name]) for rank in found for name in SHAPES)


def test_whole_weights_are_taken_from_own_memory():
    """Also where handles are exchanged because that was asked for: they are opened, and no byte of a peer is read."""
    job = Job(2, sharded=False)
    job.parts[1][0].fill_(5)
    _, found = job.sync()
    assert all(bool((t == 5).all()) for t in found[1].values()) and not bool((found[0]["c"] == 5).any())
    weight = next(iter(job.ranks[0].weights([rank.offer() for rank in job.ranks])))
    assert weight.spans[0].flat.untyped_storage().data_ptr() == job.parts[0][0].untyped_storage().data_ptr()


def test_a_storage_that_moved_is_refused():
    """Its handle was sent for good: a peer would read what lies there now."""
    job = Job(2)
    job.sync()
    job.parts[0] = shards_of(0, 2, tensors())
    with pytest.raises(RuntimeError, match="has moved since its handle was sent"):
        job.ranks[0].offer()


@pytest.mark.parametrize("number", [0, 3])
def test_a_shared_weight_that_moved_is_refused(number):
    """The engine's parameter is a view of where it was; a step in place is no move."""
    parameters = [torch.nn.Parameter(tensor) for tensor in tensors().values()]
    shared = Shared(parameters)
    parameters[number].data.add_(1)
    assert shared.offer() is None and not list(shared.weights([None]))
    parameters[number].data = parameters[number].data.clone()
    with pytest.raises(RuntimeError, match="the policy's weights have moved"):
        shared.offer()


def test_a_peer_that_sent_nothing_is_refused():
    """A reader that has no mapping cannot go by a peer's word that nothing moved."""
    job = Job(2)
    offers, _ = job.sync()
    late = Ipc(job.meshes[0], lambda: job.parts[0][1], True, True)
    offers[0] = late.offer()
    with pytest.raises(RuntimeError, match="rank 1 sent no handles"):
        list(late.weights([offers[0], Offer(HERE, None, None)]))


def test_a_weight_with_a_gap_is_refused():
    """A peer whose layout lacks a part: no half of a weight is loaded."""
    job = Job(3)
    offers = [rank.offer() for rank in job.ranks]
    offers[1] = dataclasses.replace(offers[1], layout=tuple(lies for lies in offers[1].layout if lies.name != "c"))
    with pytest.raises(RuntimeError, match="of c"):
        list(job.ranks[0].weights(offers))


def test_peers_of_other_hosts_are_left_alone():
    """With whole weights on every rank, handles of another host are not opened."""
    job = Job(2, sharded=False)
    offers = [rank.offer() for rank in job.ranks]
    offers[1] = dataclasses.replace(offers[1], place=Place("another", "cpu", 1), handles=[[], []])
    assert len(list(job.ranks[0].weights(offers))) == len(SHAPES)


@pytest.mark.parametrize("spans, whole", [([(0, 6)], True), ([(0, 2), (2, 4)], True), ([(0, 2), (3, 3)], False),
                                          ([(0, 4), (2, 4)], False), ([(0, 5)], False), ([(1, 5)], False), ([], False),
                                          ([(0, 7)], False), ([(2, 4), (0, 2)], False)])
def test_whole_is_each_element_once(spans, whole):
    """No gap, no overlap, nothing before or after."""
    weight = Weight("a", (2, 3), torch.float32, [Span(start, torch.zeros(count)) for start, count in spans])
    assert is_whole(weight) is whole


def test_layout_of_views_of_one_buffer():
    """Two weights in one storage, one in another: where each lies, in elements."""
    flat, other = torch.zeros(10), torch.zeros(4)
    weights = [Weight("a", (2, 2), torch.float32, [Span(0, flat[3:7])]), Weight.of("b", other),
               Weight("c", (9,), torch.float32, [Span(6, flat[7:10])])]
    storages, layout = lay_out(weights)
    assert len(storages) == 2
    assert layout == (Lies("a", 0, 4, 0, 3), Lies("b", 0, 4, 1, 0), Lies("c", 6, 3, 0, 7))


# Handles. -----------------------------------------------------------------------------------------------------------

CHILD = """
import pickle, sys, torch
from spmd_rl.handles import Place, open_handle
handle = pickle.load(open(sys.argv[1], "rb"))
flat = torch.empty(0).set_(open_handle(handle, Place("this", "cpu", 0)))
assert flat.tolist()[:3] == [0.0, 1.0, 2.0] and flat.numel() == 1000
flat[5] = 42.0
"""


def test_another_process_reads_and_writes_the_storage(tmp_path):
    """Views of it go on to be views of it."""
    flat = torch.arange(1000.0)
    view = flat[5:7]
    (tmp_path / "handle").write_bytes(pickle.dumps(export(flat.untyped_storage(), HERE)))
    done = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path / "handle")], timeout=120, check=False)
    assert done.returncode == 0
    assert view.tolist() == [42.0, 6.0]


@pytest.mark.parametrize("of, why", [
    (Place("another", "cpu", 1), "of host another cannot be opened on host this"),
    (Place("this", "GPU-1", 1), "of device GPU-1 cannot be opened for device cpu"),
])
def test_a_handle_that_cannot_be_opened_says_why(of, why):
    """Of another host, or of another kind of device."""
    with pytest.raises(RuntimeError, match=why):
        open_handle(Handle(of, 4, ()), HERE)


def test_gpu_handles_that_cannot_be_opened_say_why(monkeypatch):
    """One of this process's own (CUDA would say "invalid device context"), and one of a GPU that is hidden."""
    monkeypatch.setattr(handles, "_visible", lambda: {"GPU-1"})
    here = Place("this", "GPU-1", 7)
    with pytest.raises(RuntimeError, match="of its own"):
        open_handle(Handle(here, 4, ()), here)
    with pytest.raises(RuntimeError, match="GPU GPU-2 cannot be seen.*gpu-bind=none"):
        open_handle(Handle(Place("this", "GPU-2", 8), 4, ()), here)


# Which transport. ---------------------------------------------------------------------------------------------------


class Together(Ranks):
    """A rank whose peers say what the test tells."""

    def __init__(self, answers, rank=0, world_size=2):
        super().__init__(rank, world_size)
        self.answers = list(answers)

    def all_gather(self, value):
        return [value, *self.answers.pop(0)]


def test_nothing_is_tried_where_every_rank_has_all():
    """Below ZeRO-3 no handle is needed, on one host or several."""
    whole = shards_of(0, 1, tensors())[1]
    assert why_not_ipc(Together([[("another", None, True, 9)]]), whole, False) is None


def test_shards_on_two_hosts_are_gathered():
    """A handle does not reach the other host; gathers between hosts need some of as many ranks, more than one."""
    held = shards_of(0, 4, tensors())[1]

    def why_not(hosts):
        peers = [(host, None, False, 9) for host in hosts]
        tried = [[None] * len(peers)] * 2  # handles that do not come; no reason
        found = {is_forced: why_not_ipc(Together([peers, *tried], world_size=len(peers) + 1), held, is_forced)
                 for is_forced in (False, True)}
        assert found[False] == found[True]
        return found[True]

    assert "over 2 hosts of 1 ranks" in why_not(["another"])
    assert "over 2 hosts of 1 and 3 ranks" in why_not(["another"] * 3)
    assert why_not(["this", "another", "another"]) is None


@pytest.mark.parametrize("whose", ["mine", "a peer's"])
def test_weights_on_the_host_are_gathered(whose):
    """DeepSpeed's offload_param keeps them there; one rank is enough."""
    held = shards_of(0, 2, tensors())[1]
    mesh = Together([[("this", None if whose == "mine" else "a", False, 9)]])
    if whose == "mine":
        mesh.device = torch.device("cuda", 0)
        Fake = namedtuple("Fake", "host")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Place, "here", lambda device, host: Fake(host))
            assert "on the host" in why_not_ipc(mesh, held, False)
    else:
        assert "on the host" in why_not_ipc(mesh, held, False)


def peer_handle(rank, value):
    tensor = torch.full((1,), value, dtype=torch.int64)
    return [[export(tensor.untyped_storage(), HERE)], []], tensor


@pytest.mark.parametrize("value, fault, why", [
    (1, None, None),
    (3, None, "rank 0 reads 3 in rank 1's memory"),
    (1, "unreadable", "rank 0 cannot open rank 1's handle"),
    (1, "no room", "has no room"),
])
def test_a_trial_decides(monkeypatch, value, fault, why):
    """Containers with memory of their own, or too little of it: whoever cannot read its peer's value says so."""
    held = shards_of(0, 2, tensors())[1]
    sent, kept = peer_handle(1, value)
    if fault == "unreadable":
        sent = [[Handle(HERE, 8, (b"/none", b"/none", 8))], []]
    if fault == "no room":
        usage = namedtuple("usage", "free")
        monkeypatch.setattr(handles.shutil, "disk_usage", lambda path: usage(10))
    found = why_not_ipc(Together([[("this", None, False, 9)], [sent], [None]]), held, False)
    assert (found is None) if why is None else why in found
    assert kept is not None


def test_a_peers_reason_counts():
    """All ranks decide alike: one that cannot open a handle makes all gather."""
    held = shards_of(0, 2, tensors())[1]
    sent, kept = peer_handle(1, 1)
    mesh = Together([[("this", None, False, 9)], [sent], [["rank 1 cannot"]]])
    assert why_not_ipc(mesh, held, False) == ["rank 1 cannot"]
    assert kept is not None
