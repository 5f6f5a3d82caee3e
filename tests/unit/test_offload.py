"""Host memory as ranges over chunks, what is found of an engine, and a mover on plain storages."""

import random

import pytest
import torch

from spmd_rl.offload import HostMemory, Offloader, Tenant, reachable_storages

CHUNK = 2**12


class Engine:
    """Storages of two tenants; the module's name says that the walk may look inside."""

    def __init__(self):
        self.weights = torch.arange(10_000, dtype=torch.float32)
        self.view = self.weights[5_000:]
        self.moments = [torch.randn(7_001), torch.zeros(3_000)]

    def storages(self):
        return {Tenant.WEIGHTS: [self.weights.untyped_storage()],
                Tenant.MOMENTS: [t.untyped_storage() for t in self.moments]}


def mover_of(engine):
    return Offloader(torch.device("cpu"), HostMemory(False, CHUNK), engine.storages)


def test_ranges_never_overlap_and_are_used_again():
    """Random takes and returns: each range keeps its bytes, and memory does not grow without need."""
    host, draw, held = HostMemory(False, CHUNK), random.Random(0), {}
    for number in range(300):
        if held and draw.random() < 0.5:
            key = draw.choice(list(held))
            start, size = held.pop(key)
            assert all(bool((piece == key % 251).all()) for piece in host.pieces(start, size))
            host.give_back(start, size)
        else:
            size = draw.randrange(1, 3 * CHUNK)
            start = host.take(size)
            pieces = list(host.pieces(start, size))
            assert sum(map(len, pieces)) == size
            for piece in pieces:
                piece.fill_(number % 251)
            held[number] = (start, size)
    most = host.num_bytes
    for start, size in held.values():
        host.give_back(start, size)
    start = host.take(most)  # all of it is one range again
    assert start == 0 and host.num_bytes == most


def test_growth_in_the_background_is_waited_for():
    """A range taken at once lies in what the thread makes."""
    host = HostMemory(False, CHUNK)
    host.grow_in_background(20 * CHUNK)
    assert host.take(15 * CHUNK) == 0
    assert host.num_bytes == 20 * CHUNK


def test_host_memory_that_cannot_be_had_is_an_error_that_says_how_much():
    """Raised where it is taken, not lost in the thread."""
    host = HostMemory(False, 2**62)
    host.grow_in_background(1)
    with pytest.raises(MemoryError, match="no host memory .* memory.swap never"):
        host.take(1)


def test_views_survive():
    """A view made before sees the bytes again, at whatever address."""
    engine = Engine()
    mover = mover_of(engine)
    before = [t.clone() for t in (engine.view, *engine.moments)]
    mover.leave([Tenant.WEIGHTS, Tenant.MOMENTS])
    mover.finish_leaving()
    assert engine.view.untyped_storage().nbytes() == 0
    mover.enter([Tenant.MOMENTS, Tenant.WEIGHTS])
    mover.wait([Tenant.MOMENTS, Tenant.WEIGHTS])
    assert all(map(torch.equal, before, (engine.view, *engine.moments)))
    engine.weights[5_000] = -1
    assert engine.view[0] == -1


def test_called_back_before_it_left():
    """Leaving, and back before its memory was freed: nothing was lost, and nothing is freed later."""
    engine = Engine()
    mover = mover_of(engine)
    before = engine.weights.clone()
    mover.leave([Tenant.WEIGHTS])
    mover.enter([Tenant.WEIGHTS])
    engine.weights[0] = 7  # the owner goes on
    mover.finish_leaving()
    assert engine.weights[0] == 7 and torch.equal(engine.weights[1:], before[1:])
    mover.leave([Tenant.WEIGHTS])
    mover.finish_leaving()
    mover.enter([Tenant.WEIGHTS])
    mover.wait([Tenant.WEIGHTS])
    assert engine.weights[0] == 7 and torch.equal(engine.weights[1:], before[1:])


def test_what_its_owner_drops_is_forgotten():
    """On the device or away: its range of host memory is used again."""
    engine = Engine()
    mover = mover_of(engine)
    for _ in range(5):
        mover.leave([Tenant.MOMENTS])
        mover.finish_leaving()
        engine.moments = [torch.randn(7_001), torch.zeros(3_000)]  # dropped while away
        mover.leave([Tenant.MOMENTS])
        mover.finish_leaving()
        mover.enter([Tenant.MOMENTS])
        mover.wait([Tenant.MOMENTS])
        engine.moments = [torch.randn(7_001), torch.zeros(3_000)]  # dropped on the device
    assert mover._host.num_bytes <= 3 * (7_001 + 3_000) * 4


def test_zero_gradients_are_not_copied():
    """All bits 0: nothing travels; a negative zero is not all bits 0."""
    tensors = [torch.zeros(5_000), torch.zeros(5_000)]
    tensors[1][4_999] = -0.0
    mover = Offloader(torch.device("cpu"), HostMemory(False, CHUNK),
                      lambda: {Tenant.GRADIENTS: [t.untyped_storage() for t in tensors]})
    moved = mover.leave([Tenant.GRADIENTS])
    mover.finish_leaving()
    assert (moved.copied_bytes, moved.tenants[Tenant.GRADIENTS]) == (20_000, 40_000)
    mover.enter([Tenant.GRADIENTS])
    mover.wait([Tenant.GRADIENTS])
    assert not tensors[0].any() and torch.signbit(tensors[1]).nonzero().tolist() == [[4_999]]


def test_the_walk_finds_tensors_behind_containers_and_attributes():
    """Lists, dicts by key and value, attributes of tensors, gradients, objects of the named packages; cycles end."""
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    parameter.attached = {"deep": [torch.ones(4)]}
    keyed = {torch.ones(5): (torch.ones(6),)}
    engine = Engine()
    engine.itself = engine
    root = [parameter, keyed, engine, torch.empty(9, device="meta"), [parameter]]
    root.append(root)
    sizes = sorted(s.nbytes() // 4 for s in reachable_storages(root, (Engine.__module__.split(".")[0],)))
    assert sizes == sorted([3, 3, 4, 5, 6, 10_000, 7_001, 3_000])
    assert len(reachable_storages(root, ())) == 5, "no package named: nothing inside Engine"


@pytest.mark.parametrize("when", ["before the first move", "after one"])
def test_shared_memory_is_left_alone(when):
    """What peers have mapped keeps its place: torch lets it be resized, and ends the process when it is used again."""
    engine = Engine()
    mover = mover_of(engine)
    if when == "after one":
        for call in (mover.leave, lambda tenants: mover.finish_leaving(), mover.enter, mover.wait):
            call([Tenant.WEIGHTS])
    engine.weights.untyped_storage()._share_filename_cpu_()
    place = engine.weights.data_ptr()
    for _ in range(2):
        mover.leave([Tenant.WEIGHTS, Tenant.MOMENTS])
        mover.finish_leaving()
        assert engine.weights.data_ptr() == place and not engine.moments[0].untyped_storage().nbytes()
        mover.enter([Tenant.WEIGHTS, Tenant.MOMENTS])
        mover.wait(Tenant)
    assert engine.view.equal(torch.arange(5_000, 10_000, dtype=torch.float32))
