"""The memory plan against arithmetic done by hand, and what it decides and refuses."""

from dataclasses import replace

import pytest

from spmd_rl.config import Config, ConfigError
from spmd_rl.flops import ModelShape
from spmd_rl.offload import Tenant
from spmd_rl.plan import ENGINE, GIB, PHASES, POLICY, make_plan

# 10 layers of width 1000 with 100 M parameters: sizes by hand are round.
SHAPE = ModelShape(num_parameters=100_000_000, largest_parameter=20_000_000, windows=(None,) * 10, hidden=1000,
                   intermediate=3000, query_width=1000, key_width=500, vocabulary=19_968)
MB = 10**6


def config(**sections):
    made = Config()
    for name, values in sections.items():
        for field, value in values.items():
            setattr(getattr(made, name), field, value)
    return made


def tenants(world_size=1, **sections):
    return make_plan(config(**sections), SHAPE, world_size, 100 * GIB).tenants


@pytest.mark.parametrize("stage, weights, masters, moments, gradients", [
    (0, 200, 400, 800, 600), (1, 200, 100, 200, 400), (2, 200, 100, 200, 100), (3, 50, 100, 200, 100)])
def test_states_of_a_rank(stage, weights, masters, moments, gradients):
    """bf16 on 4 ranks, in MB: 2 bytes of weights a parameter, 4 of masters, 8 of moments, 4 of gradients."""
    found = tenants(4, policy={"zero_stage": stage})
    assert [found[t] for t in (Tenant.WEIGHTS, Tenant.MASTERS, Tenant.MOMENTS, Tenant.GRADIENTS)] == [
        weights * MB, masters * MB, moments * MB, gradients * MB]


def test_states_in_fp32():
    """No second copy at stage 0, where the weights are the masters."""
    found = tenants(policy={"zero_stage": 0}, model={"dtype": "float32"})
    assert (found[Tenant.WEIGHTS], found[Tenant.MASTERS]) == (400 * MB, 0)


def test_what_lives_elsewhere_or_is_not_there_takes_nothing():
    """SGD has no moments, no beta no reference, an offloaded optimizer no bytes on the device."""
    found = tenants(policy={"optimizer": "sgd"})
    assert found[Tenant.MOMENTS] == found[Tenant.REFERENCE] == 0
    found = tenants(deepspeed={}, loss={"beta": 0.1})
    assert found[Tenant.REFERENCE] == 200 * MB
    offloaded = config()
    offloaded.deepspeed = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    found = make_plan(offloaded, SHAPE, 1, 100 * GIB).tenants
    assert found[Tenant.MASTERS] == found[Tenant.MOMENTS] == found[Tenant.GRADIENTS] == 0
    none = config()
    none.deepspeed = {"zero_optimization": {"offload_optimizer": {"device": "none"}}}
    assert make_plan(none, SHAPE, 1, 100 * GIB).tenants == tenants()


@pytest.mark.parametrize("transport", ["auto", "ipc"])
def test_the_engine_takes_its_share(transport):
    """Its weights, work and KV cache together are gpu_memory_utilization of the device, and weights that are the
    policy's come on top; or the cache is as said."""
    sections = dict(memory={"swap": "always"}, weight_sync={"transport": transport})
    plan = make_plan(config(rollout={"gpu_memory_utilization": 0.4}, **sections), SHAPE, 1, 100 * GIB)
    row = plan.row("rollout")
    assert bool(row.get("weights")) == (transport == "auto") != bool(row["engine weights"])
    assert row["engine weights"] + row["KV cache"] + row["engine's work"] == pytest.approx(40 * GIB, abs=2)
    assert plan.total("rollout") == pytest.approx(40 * GIB + row.get("weights", 0) + row["context"], abs=2)
    plan = make_plan(config(rollout={"kv_cache_gib": 7.5}), SHAPE, 1, 100 * GIB)
    assert plan.tenants[Tenant.KV_CACHE] == 7.5 * GIB


def test_auto_keeps_all_where_it_fits():
    """A small model beside 40 % of a large device."""
    plan = make_plan(config(rollout={"gpu_memory_utilization": 0.4}), SHAPE, 1, 100 * GIB)
    assert plan.residents == frozenset(Tenant) and not plan.engine_sleeps and plan.host_bytes == 0
    assert "all of it stays" in list(plan.lines())[-1]


def test_auto_moves_the_least_that_it_must():
    """At 97 % for the engine nothing else stays; a little below, what fits, and never more than fits."""
    before = -1
    for share in (0.9, 0.85, 0.8, 0.5):
        plan = make_plan(config(rollout={"gpu_memory_utilization": share}), SHAPE, 1, 24 * GIB)
        kept = sum(plan.tenants[t] for t in POLICY if t in plan.residents)
        assert kept >= before
        before = kept
        assert all(plan.total(phase) <= 24 * GIB for phase in PHASES)
    assert before > 0


@pytest.mark.parametrize("transport, kept", [("auto", {Tenant.WEIGHTS}), ("ipc", set())])
def test_always_and_never(transport, kept):
    """The two ends, whatever would fit; weights that the engine's parameters are views of stay in both."""
    plan = make_plan(config(memory={"swap": "always"}, weight_sync={"transport": transport}), SHAPE, 1, 100 * GIB)
    assert plan.residents == kept and plan.engine_sleeps
    # Everything of the policy is pinned but scratch, which has no bytes worth keeping.
    assert plan.host_bytes == sum(plan.tenants[t] for t in POLICY if t not in {Tenant.SCRATCH} | kept)
    plan = make_plan(config(memory={"swap": "never"}), SHAPE, 1, 100 * GIB)
    assert plan.residents >= ENGINE and not plan.engine_sleeps


@pytest.mark.parametrize("sections, on_gpu, shares", [
    ({}, True, True), ({}, False, False), ({"policy": {"zero_stage": 3}}, True, False),
    ({"rollout": {"tensor_parallel_size": 2}}, True, False), ({"weight_sync": {"transport": "shared"}}, False, True),
    ({"weight_sync": {"transport": "ipc"}}, True, False)])
def test_auto_shares_weights_where_an_engine_can_have_them(sections, on_gpu, shares):
    """Whole ones on each rank, an engine of one rank, a GPU."""
    assert make_plan(config(**sections), SHAPE, 1, 100 * GIB if on_gpu else None).shares_weights is shares
    padded = replace(SHAPE, vocabulary=SHAPE.vocabulary + 1)  # by vLLM, to a multiple of 64
    is_forced = "weight_sync" in sections
    assert make_plan(config(**sections), padded, 1, 100 * GIB if on_gpu else None).shares_weights is (
        shares and is_forced)


def test_without_a_device_nothing_moves_by_itself():
    """On CPU ranks auto has nothing to gain."""
    assert make_plan(config(), SHAPE, 1, None).residents == frozenset(Tenant)
    assert not make_plan(config(memory={"swap": "always"}), SHAPE, 1, None).residents


@pytest.mark.parametrize("sections, phase, remedy", [
    (dict(rollout={"kv_cache_gib": 90.0}), "rollout", "lower rollout.kv_cache_gib (90.0)"),
    (dict(batch={"max_tokens_per_microbatch": 400_000}), "train", "lower batch.max_tokens_per_microbatch (400000)"),
    (dict(batch={"max_tokens_per_microbatch": 60_000}, policy={"gradient_checkpointing": False}), "train",
     "policy.gradient_checkpointing true"),
    (dict(memory={"swap": "never"}, rollout={"gpu_memory_utilization": 0.95}), "rollout", "memory.swap auto")])
def test_what_cannot_fit_is_refused_with_what_would(sections, phase, remedy):
    """The phase, its numbers, and the settings to change; nothing is loaded before."""
    with pytest.raises(ConfigError) as caught:
        make_plan(config(**sections), SHAPE, 1, 40 * GIB)
    text = str(caught.value)
    assert text.startswith(f"the {phase} phase needs about") and "which has 40.0" in text and remedy in text


@pytest.mark.parametrize("transport, share, accepted", [
    ("ipc", 0.001, False), ("ipc", 0.0019, False), ("ipc", 0.003, True), ("auto", 0.0003, False),
    ("auto", 0.001, True)])
def test_a_share_of_the_device_without_room_for_a_sequence_is_refused(transport, share, accepted):
    """200 MB of weights, the policy's own or not, and 49 MiB of KV cache for a sequence, in 100 GiB."""
    options = dict(rollout={"gpu_memory_utilization": share, "max_completion_length": 11_776},
                   data={"max_prompt_length": 512}, weight_sync={"transport": transport})
    shape = replace(SHAPE, windows=(None,) * 3 + (1024,), key_width=340)
    if accepted:
        make_plan(config(**options), shape, 1, 100 * GIB)
        return
    with pytest.raises(ConfigError, match="gpu_memory_utilization is.*one sequence of 12288 tokens takes 0.05 GiB"):
        make_plan(config(**options), shape, 1, 100 * GIB)
    options["rollout"]["kv_cache_gib"] = 2.0  # a fixed cache needs no share
    make_plan(config(**options), shape, 1, 100 * GIB)
    options["rollout"]["kv_cache_gib"] = 0.04
    with pytest.raises(ConfigError, match="kv_cache_gib is 0.04: one sequence"):
        make_plan(config(**options), shape, 1, 100 * GIB)


def test_second_shards_have_their_phases():
    """ZeRO++'s hpZ: weights over the ranks of a group, beside forward and backward; nothing without it."""
    for group, size in ((1, 0), (4, 50 * MB)):
        options = config(policy={"zero_stage": 3}, loss={"beta": 0.1})
        options.deepspeed = {"zero_optimization": {"zero_hpz_partition_size": group}}
        others = make_plan(options, SHAPE, 8, 100 * GIB).others
        assert [others[phase].get("second shards", 0) for phase in PHASES] == [0, size, size, 0]


def test_the_table_adds_up():
    """Each column's last line is the sum of those above it."""
    plan = make_plan(config(loss={"beta": 0.1}, memory={"swap": "always"}), SHAPE, 2, 100 * GIB)
    head, *rows, total, _ = [line.rsplit(None, 4) for line in plan.lines()]
    assert head[1:] == ["rollout", "reference", "train", "sync"]
    for column in range(1, 5):
        numbers = [float(row[column]) for row in rows if row[column] != "-"]
        assert sum(numbers) == pytest.approx(float(total[column]), abs=0.05)
