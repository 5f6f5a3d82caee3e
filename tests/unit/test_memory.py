"""The order of moves on a device that is just large enough: whatever phase follows, never more than it holds."""

import contextlib
import json
import random
import time
from types import SimpleNamespace

import pytest
import torch

from spmd_rl import memory as memory_module
from spmd_rl.memory import Memory
from spmd_rl.offload import HostMemory, Tenant
from spmd_rl.plan import ENGINE, PHASES, Plan
from spmd_rl.rollout import EngineState

KB = 2**12
SIZES = {Tenant.WEIGHTS: 2 * KB, Tenant.GRADIENTS: 3 * KB, Tenant.SCRATCH: KB, Tenant.MASTERS: 4 * KB,
         Tenant.MOMENTS: 8 * KB, Tenant.REFERENCE: 2 * KB, Tenant.ENGINE_WEIGHTS: 2 * KB, Tenant.KV_CACHE: 13 * KB}
TRAIN = 18 * KB  # the policy's states, the largest phase; rollout takes 15
ROUTES = {"rollout": ["train", "reference"], "reference": ["train"], "train": ["sync"], "sync": ["rollout"]}


class Device:
    """Storages and an engine of given sizes; `most` is the largest sum that was seen."""

    def __init__(self):
        self.tensors = {tenant: torch.ones(size, dtype=torch.uint8) for tenant, size in SIZES.items()
                        if tenant not in ENGINE}
        self.state, self.always_bytes = EngineState.ASLEEP, 3
        self.most, self.events = 0, []

    @property
    def used(self):
        awake = {EngineState.ASLEEP: [], EngineState.READY: list(ENGINE)}.get(self.state, [Tenant.ENGINE_WEIGHTS])
        return sum(t.untyped_storage().nbytes() for t in self.tensors.values()) + sum(SIZES[t] for t in awake)

    def look(self, event):
        self.events.append(event)
        self.most = max(self.most, self.used)

    def storages(self):
        return {tenant: [t.untyped_storage()] for tenant, t in self.tensors.items()}

    # What Memory asks of the engine.

    def sleep(self):
        self.state = EngineState.ASLEEP
        self.look("sleep")

    def wake_weights(self):
        self.state = EngineState.WEIGHTS_AWAKE
        self.look("wake weights")

    def wake_kv_cache(self):
        self.state = EngineState.READY
        self.look("wake KV cache")

    def pool_bytes(self, tag):
        return SIZES[Tenant.KV_CACHE if tag == "kv_cache" else Tenant.ENGINE_WEIGHTS]


class Metrics:
    """Takes and forgets."""

    @contextlib.contextmanager
    def timed(self, phase):
        yield

    def maximum(self, name, value):
        pass

    total = maximum


@pytest.fixture
def make(monkeypatch):
    """A Memory on a device of a capacity; `residents` stay."""
    def made(capacity, residents=frozenset(), timelines=()):
        device = Device()
        plan = Plan(SIZES, {phase: {} for phase in PHASES}, residents, dict.fromkeys(PHASES, "less"), capacity)
        mesh = SimpleNamespace(device=torch.device("cpu"), world_size=1, phase="x", all_true=lambda value: value)
        found = Memory(mesh, device, device.storages, HostMemory(False, KB), Metrics(), plan, timelines)
        monkeypatch.setattr(memory_module, "SLACK_BYTES", 0)
        monkeypatch.setattr(found, "_fits", lambda num_bytes: device.used + num_bytes <= capacity)
        start = found._start_entering
        monkeypatch.setattr(found, "_start_entering", lambda tenants: (start(tenants), device.look("enter")))
        return found, device
    return made


def walk(memory, device, phases):
    for phase in phases:
        memory.enter(phase)
        if phase == "train":
            memory.wait_for_step()
        if phase == "sync" and device.state is EngineState.WEIGHTS_AWAKE:
            device.state = EngineState.WEIGHTS_LOADED


def test_case_50_never_more_than_the_device_holds(make):
    """Random ways through the phases, with a device that holds the largest phase and not a byte more; who belongs to a
    phase is there in it, whole."""
    memory, device = make(TRAIN)
    del device.tensors[Tenant.REFERENCE]  # not on the device at the start either: it would not fit
    draw, phase = random.Random(0), "train"
    for _ in range(60):
        phase = draw.choice([p for p in ROUTES[phase] if p != "reference"])
        walk(memory, device, [phase])
        there = {t for t, tensor in device.tensors.items() if tensor.untyped_storage().nbytes()}
        assert PHASES[phase] - ENGINE <= there | {Tenant.REFERENCE}
        assert all(bool((device.tensors[t] == 1).all()) for t in PHASES[phase] - ENGINE - {Tenant.SCRATCH})
    assert device.most == TRAIN
    memory.close()


@pytest.mark.parametrize("state, asleep", [
    (EngineState.ASLEEP, SIZES[Tenant.ENGINE_WEIGHTS] + SIZES[Tenant.KV_CACHE]),
    (EngineState.WEIGHTS_LOADED, SIZES[Tenant.KV_CACHE]), (EngineState.READY, 0)])
def test_torchs_peak_is_of_what_was_on_the_device(make, monkeypatch, state, asleep):
    """An engine's memory that sleep gave to the driver stays allocated in torch's books."""
    memory, device = make(TRAIN)
    device.state, found = state, {}
    monkeypatch.setattr(memory, "_is_cuda", True)
    monkeypatch.setattr(memory._metrics, "maximum", found.__setitem__, raising=False)
    monkeypatch.setattr(memory_module, "used_bytes", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 10 * TRAIN)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    memory._report()
    assert found["memory/train_peak_allocated_gib"] == (10 * TRAIN - asleep) / 2**30


def test_the_order_where_nothing_fits_beside_another(make):
    """Weights awake and loaded, the policy's copy gone, then the cache; the engine asleep before the policy returns."""
    memory, device = make(TRAIN)
    del device.tensors[Tenant.REFERENCE]
    walk(memory, device, ["sync"])
    device.events.clear()
    walk(memory, device, ["rollout", "train", "sync", "rollout"])
    assert [e for e in device.events if e != "enter"] == ["wake KV cache", "sleep", "wake weights", "wake KV cache"]
    assert device.events.index("sleep") < device.events.index("enter", device.events.index("sleep"))
    memory.close()


def test_where_there_is_room_copies_run_behind(make):
    """With twice the room the copies back start before the engine sleeps, and what left is freed while it samples."""
    memory, device = make(2 * TRAIN + 20 * KB)
    walk(memory, device, ["sync", "rollout"])
    memory._settle()
    assert not any(t.untyped_storage().nbytes() for t in device.tensors.values())
    device.events.clear()
    walk(memory, device, ["train"])
    assert device.events.index("enter") < device.events.index("sleep")
    memory.close()


def test_residents_stay(make):
    """Nothing moves where all stay, and a phase entered twice is no work."""
    memory, device = make(10 * TRAIN, frozenset(Tenant))
    device.state = EngineState.READY
    addresses = {t: tensor.data_ptr() for t, tensor in device.tensors.items()}
    walk(memory, device, ["sync"])
    device.state = EngineState.WEIGHTS_LOADED  # a sync of an engine that never sleeps
    walk(memory, device, ["rollout", "rollout", "reference", "train", "train"])
    assert addresses == {t: tensor.data_ptr() for t, tensor in device.tensors.items()}
    assert device.events.count("sleep") == 0
    memory.close()


def test_a_checkpoint_in_rollout_puts_the_engine_to_sleep_only_where_it_must(make):
    """Held beside the engine where both fit; else the engine sleeps, and the phase is one that needs a sync."""
    for capacity, is_asleep in ((TRAIN, True), (3 * TRAIN, False)):
        memory, device = make(capacity)
        del device.tensors[Tenant.REFERENCE]
        walk(memory, device, ["sync", "rollout"])
        with memory.holding([Tenant.WEIGHTS, Tenant.MASTERS, Tenant.MOMENTS]):
            assert all(bool((device.tensors[t] == 1).all()) for t in (Tenant.WEIGHTS, Tenant.MASTERS, Tenant.MOMENTS))
        assert (device.state is EngineState.ASLEEP) == is_asleep
        assert memory.phase == ("train" if is_asleep else "rollout")
        assert device.most <= capacity
        memory.close()


def test_a_failure_behind_sampling_is_raised_at_the_next_phase(make, monkeypatch):
    """Not lost with the thread it happened in."""
    memory, device = make(2 * TRAIN + 20 * KB)
    walk(memory, device, ["sync"])
    monkeypatch.setattr(memory._offloader, "finish_leaving", lambda: (_ for _ in ()).throw(OSError("no copy")))
    walk(memory, device, ["rollout"])
    with pytest.raises(OSError, match="no copy"):
        memory.enter("train")


def test_only_what_forward_needs_is_on_its_way_when_the_engine_goes_to_sleep(make, monkeypatch):
    """vLLM's sleep waits for all copies: masters and moments would be waited for, which come back behind forward."""
    memory, device = make(2 * TRAIN + 20 * KB)
    walk(memory, device, ["sync", "rollout"])
    memory._settle()
    there = []

    def sleep():
        there.extend(tenant for tenant, tensor in device.tensors.items() if tensor.untyped_storage().nbytes())
        device.state = EngineState.ASLEEP

    monkeypatch.setattr(device, "sleep", sleep)
    walk(memory, device, ["train"])
    assert Tenant.WEIGHTS in there and not {Tenant.MASTERS, Tenant.MOMENTS} & set(there)
    assert all(device.tensors[t].untyped_storage().nbytes() for t in (Tenant.MASTERS, Tenant.MOMENTS))
    memory.close()


def test_the_timeline_says_how_long_the_step_waited(make, monkeypatch, tmp_path):
    """In the line of the change that took so long, and in no other; what a wait before the optimizer step took is in
    the next one."""
    path = tmp_path / "memory.jsonl"
    memory, device = make(TRAIN, timelines=[path.open("w")])
    wait = memory._offloader.wait
    # The sleeps are the time that the lines have to show.
    monkeypatch.setattr(device, "sleep", lambda: (time.sleep(0.05), setattr(device, "state", EngineState.ASLEEP)))
    walk(memory, device, ["sync", "rollout"])
    memory.enter("train")
    monkeypatch.setattr(memory._offloader, "wait", lambda tenants: (time.sleep(0.1), wait(tenants)))
    memory.wait_for_step()
    monkeypatch.setattr(memory._offloader, "wait", wait)
    walk(memory, device, ["sync"])
    memory.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    by_phase = [(line["phase"], line["exposed_s"]) for line in lines]
    assert [phase for phase, _ in by_phase] == ["sync", "rollout", "rollout", "train", "sync"]
    assert by_phase[3][1] >= 0.05 and by_phase[4][1] >= 0.1 and by_phase[2][1] == 0.0
    assert max(by_phase[0][1], by_phase[1][1]) < 0.05


def test_the_timeline_has_a_line_for_each_change(make, tmp_path):
    """Phase, tenants in GiB, memory in use, the moves that ended; one more where memory was freed behind sampling."""
    path = tmp_path / "memory.jsonl"
    memory, device = make(TRAIN, timelines=[path.open("w")])
    del device.tensors[Tenant.REFERENCE]
    walk(memory, device, ["sync", "rollout", "train"])
    memory.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["phase"] for line in lines] == ["sync", "rollout", "rollout", "train"]
    assert [line["tenants_gib"]["weights"] > 0 for line in lines] == [True, True, False, True]
    assert lines[-1]["tenants_gib"]["moments"] == SIZES[Tenant.MOMENTS] / 2**30
    assert all(line["tenants_gib"]["engine, always"] == 3 / 2**30 for line in lines)
    assert lines[1]["tenants_gib"]["KV cache"] == SIZES[Tenant.KV_CACHE] / 2**30
    assert {move["direction"] for line in lines for move in line["moves"]} <= {"in", "out"}
