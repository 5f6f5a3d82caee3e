"""Who fits on the device in which phase: the table of phases and tenants in bytes, by arithmetic from the config.

States are exact; activations and the engine's own working memory are estimates. From the table follow, for
memory.swap auto, the tenants that stay on the device in every phase; the others leave when their phase ends.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any

from spmd_rl.config import Config, ConfigError
from spmd_rl.flops import ModelShape
from spmd_rl.offload import Tenant

GIB = 2**30
CONTEXT_BYTES = 2 * GIB  # the CUDA context, the kernels' modules, NCCL, cuBLAS workspaces
MARGIN = 0.03  # of the device, kept free by auto: allocators round up
REDUCE_BUCKET = 5 * 10**8  # elements, DeepSpeed's default

PHASES: dict[str, set[Tenant]] = {
    "rollout": {Tenant.ENGINE_WEIGHTS, Tenant.KV_CACHE},
    "reference": {Tenant.REFERENCE},
    "train": {Tenant.WEIGHTS, Tenant.GRADIENTS, Tenant.SCRATCH, Tenant.MASTERS, Tenant.MOMENTS},
    "sync": {Tenant.WEIGHTS, Tenant.ENGINE_WEIGHTS},
}
POLICY = (Tenant.WEIGHTS, Tenant.GRADIENTS, Tenant.SCRATCH, Tenant.MASTERS, Tenant.MOMENTS)  # as forward needs them
ENGINE = {Tenant.ENGINE_WEIGHTS, Tenant.KV_CACHE}


@dataclass(frozen=True)
class Plan:
    """What stays on the device, and the bytes behind the decision."""

    tenants: dict[Tenant, int]
    """Bytes of each on one rank's device, when all of it is there."""
    others: dict[str, dict[str, int]]
    """Phase -> what else takes memory in it, in bytes."""
    residents: frozenset[Tenant]
    """On the device in every phase."""
    remedies: dict[str, str]
    """Phase -> settings that make it smaller, those first that cost least."""
    device_bytes: int | None
    """Of the smallest device of the job; None where no device could be asked."""
    shares_weights: bool = False
    """Whether the engine is to be started on the policy's own weights, which then stay on the device."""

    @property
    def engine_sleeps(self) -> bool:
        """Whether vLLM's sleep mode is needed."""
        return not ENGINE <= self.residents

    @property
    def host_bytes(self) -> int:
        """Pinned host memory that leaving takes on one rank; scratch is dropped, not copied."""
        return sum(size for tenant, size in self.tenants.items()
                   if tenant not in self.residents | ENGINE | {Tenant.SCRATCH})

    def total(self, phase: str) -> int:
        """Bytes on the device in a phase."""
        return sum(self.row(phase).values())

    def row(self, phase: str) -> dict[str, int]:
        """Name -> bytes of all that is on the device in a phase."""
        there = PHASES[phase] | self.residents
        return {tenant.value: size for tenant, size in self.tenants.items() if tenant in there} | self.others[phase]

    def lines(self) -> Iterator[str]:
        """The table in GiB, for people."""
        phases = [phase for phase in PHASES if phase != "reference" or self.tenants[Tenant.REFERENCE]]
        rows = {phase: self.row(phase) for phase in phases}
        names = list(dict.fromkeys([t.value for t, size in self.tenants.items() if size]
                                   + [name for row in rows.values() for name, size in row.items() if size]))
        yield f"{'GiB on a rank':<24}" + "".join(f"{phase:>11}" for phase in phases)
        for name in names:
            yield f"{name:<24}" + "".join(f"{rows[p][name] / GIB:>11.2f}" if rows[p].get(name) else f"{'-':>11}"
                                          for p in phases)
        yield f"{'all (estimate)':<24}" + "".join(f"{self.total(phase) / GIB:>11.2f}" for phase in phases)
        if self.device_bytes:
            yield f"the device has {self.device_bytes / GIB:.2f}; " + self._what_moves()
        else:
            yield "no device could be asked: memory.device_gib says its size"

    def _what_moves(self) -> str:
        moving = [t.value for t, size in self.tenants.items() if size and t not in self.residents]
        if not moving:
            return "all of it stays there in every phase"
        return f"{', '.join(moving)} take turns, by way of {self.host_bytes / GIB:.2f} GiB of pinned host memory"


def make_plan(config: Config, model: ModelShape, world_size: int, device_bytes: int | None) -> Plan:
    """The table, and what stays. Raises ConfigError where a phase cannot fit, with the numbers and what to set."""
    shares = shares_weights(config, model, bool(device_bytes))
    _check_share(config, model, device_bytes, shares)
    tenants = _tenants(config, model, world_size, device_bytes, shares)
    others = _others(config, model, world_size, device_bytes)
    remedies = {phase: _remedy(config, phase, shares) for phase in PHASES}
    # Storage that the engine's parameters are views of never moves.
    pinned = frozenset({Tenant.WEIGHTS}) if shares else frozenset[Tenant]()
    plan = Plan(tenants, others, pinned, remedies, device_bytes, shares)
    if config.memory.swap == "never" or config.memory.swap == "auto" and not device_bytes:
        plan = replace(plan, residents=frozenset(Tenant))
    elif config.memory.swap == "auto":
        plan = replace(plan, residents=_residents(plan))
    for phase in PHASES:
        if device_bytes and plan.total(phase) > device_bytes:
            raise ConfigError(
                f"the {phase} phase needs about {plan.total(phase) / GIB:.1f} GiB a device, which has "
                f"{device_bytes / GIB:.1f}: "
                + ", ".join(f"{name} {size / GIB:.1f}" for name, size in plan.row(phase).items() if size)
                + f"; what helps: {remedies[phase]}")
    return plan


def shares_weights(config: Config, model: ModelShape, on_gpu: bool) -> bool:
    """Whether an engine is to be started on the policy's own memory; it may turn out that it cannot."""
    if config.weight_sync.transport != "auto":
        return config.weight_sync.transport == "shared"
    # On a CPU vLLM repacks nearly every model, and a vocabulary is padded to a multiple of 64.
    return (on_gpu and config.rollout.tensor_parallel_size == 1 and config.policy.zero_stage < 3
            and model.vocabulary % 64 == 0)


def _check_share(config: Config, model: ModelShape, device_bytes: int | None, shares: bool) -> None:
    """Raises ConfigError where what the engine may take leaves its KV cache no room for one sequence."""
    r, width = config.rollout, 2 if config.model.dtype == "bfloat16" else 4
    if not device_bytes:
        return
    t = r.tensor_parallel_size
    engine_weights = 0 if shares else width * model.num_parameters // t
    cache_width = 1 if "kv_cache_dtype" in config.vllm else width
    sequence = sum(2 * cache_width * (model.key_width // t) * min(window or config.max_model_len, config.max_model_len)
                   for window in model.windows)
    takes = f"one sequence of {config.max_model_len} tokens takes {sequence / GIB:.2f} GiB of it"
    if r.kv_cache_gib:
        if r.kv_cache_gib * GIB < sequence:
            raise ConfigError(f"rollout.kv_cache_gib is {r.kv_cache_gib}: {takes}; raise it")
        return
    share = int(r.gpu_memory_utilization * device_bytes)
    if share - engine_weights <= sequence:
        raise ConfigError(f"rollout.gpu_memory_utilization is {r.gpu_memory_utilization}: that is {share / GIB:.2f} "
                          f"GiB, less {engine_weights / GIB:.2f} of weights, for work and KV cache; {takes}; raise it")


def _tenants(config: Config, model: ModelShape, world_size: int, device_bytes: int | None,
             shares: bool) -> dict[Tenant, int]:
    """Bytes by DeepSpeed's own layout at each stage; masters and moments are fp32."""
    stage, n = config.policy.zero_stage, model.num_parameters
    is_bf16 = config.model.dtype == "bfloat16"
    width = 2 if is_bf16 else 4
    shard = -(-n // world_size)
    optimizer_elements = n if stage == 0 else shard
    has_masters = is_bf16 or stage > 0
    on_host = _offload_device(config, "offload_optimizer") not in (None, "none")
    weights_on_host = _offload_device(config, "offload_param") not in (None, "none")
    # At stage 0 the bf16 ones beside their fp32 sum; at stages 1 to 3 in fp32 only.
    gradients = {0: n * 6 if is_bf16 else n * 4, 1: 4 * n, 2: 4 * shard, 3: 4 * shard}
    weights = width * (shard if stage == 3 else n)
    t = config.rollout.tensor_parallel_size
    engine_weights = 0 if shares else width * n // t
    engine = int(config.rollout.gpu_memory_utilization * device_bytes) if device_bytes else 0
    kv_cache = (int(config.rollout.kv_cache_gib * GIB) if config.rollout.kv_cache_gib
                else max(0, engine - engine_weights - _engine_work(config, model)))
    reference_shard = shard if stage == 3 else n
    return {
        Tenant.WEIGHTS: 0 if weights_on_host else weights,
        Tenant.MASTERS: 0 if on_host or not has_masters else 4 * optimizer_elements,
        Tenant.MOMENTS: 0 if on_host or config.policy.optimizer == "sgd" else 8 * optimizer_elements,
        Tenant.GRADIENTS: 0 if on_host and stage > 0 else gradients[stage],
        Tenant.SCRATCH: _reduce_bucket(config) * width if stage == 3 else 0,
        Tenant.REFERENCE: width * reference_shard if config.loss.beta > 0 else 0,
        Tenant.ENGINE_WEIGHTS: engine_weights,
        Tenant.KV_CACHE: kv_cache,
    }


def _others(config: Config, model: ModelShape, world_size: int, device_bytes: int | None) -> dict[str, dict[str, int]]:
    """Phase -> what else: working memory that nobody moves, since it is gone when its phase ends."""
    stage = config.policy.zero_stage
    width = 2 if config.model.dtype == "bfloat16" else 4
    tokens = max(config.batch.max_tokens_per_microbatch, config.max_model_len)
    forward = tokens * _layer_bytes(model, width) + int(config.policy.logprob_memory_gib * GIB)
    gathered = 2 * model.largest_parameter * width if stage == 3 and world_size > 1 else 0
    if config.policy.gradient_checkpointing:
        checkpointed = -(-len(model.windows) // config.policy.gradient_checkpointing_every)
        kept = len(model.windows) - checkpointed + 2  # two blocks' activations while one is computed again
        saved = checkpointed * model.hidden * width * tokens + kept * tokens * _layer_bytes(model, width)
    else:
        saved = (len(model.windows) + 1) * tokens * _layer_bytes(model, width)
    # The head: a tile of logits, hidden states of targets and their gradient, that in fp32 and a tile's part of it, the
    # weight's gradient.
    head = int(config.policy.logprob_memory_gib * GIB) + tokens * model.hidden * (3 * width + 8) + (
        width * model.vocabulary * model.hidden)
    buckets = 2 * _reduce_bucket(config) * width if stage in (1, 2) else 0
    context = {"context": CONTEXT_BYTES}
    bucket = max(config.weight_sync.bucket_mib * 2**20, model.largest_parameter * width)
    # What is gathered, and what comes from other hosts: both at the first sync, which compares them.
    staging = 2 * min(bucket, model.num_parameters * width) if stage == 3 else 0
    group = _second_shards(config)
    has_second = stage == 3 and group > 1 and _offload_device(config, "offload_param") in (None, "none")
    second = {"second shards": -(-model.num_parameters // group) * width if has_second else 0}
    return {
        "rollout": {"engine's work": _engine_work(config, model)} | context,
        "reference": {"activations": forward + gathered} | second | context,
        "train": {"activations": saved + head + gathered, "reduce buckets": buckets} | second | context,
        "sync": {"staging": staging} | context,
    }


def _layer_bytes(model: ModelShape, width: int) -> int:
    """Activations of one block that its backward reads, bytes a token: norms (upcast to fp32), projections and their
    rotary forms, attention, the gated MLP."""
    heads = model.query_width + model.key_width
    return (model.hidden * (2 * (4 + 2 * width) + width) + heads * (4 + 5 * width) + model.key_width * width
            + 4 * width * model.intermediate)


def _engine_work(config: Config, model: ModelShape) -> int:
    """vLLM's activations and logits at its largest batch, by its defaults."""
    tokens = int(config.vllm.get("max_num_batched_tokens") or 16384)
    rows = int(config.vllm.get("max_num_seqs") or 1024)
    width = 2 if config.model.dtype == "bfloat16" else 4
    t = config.rollout.tensor_parallel_size
    return tokens * (4 * model.hidden + 3 * model.intermediate // t) * width + rows * model.vocabulary * 4 * 2


def _reduce_bucket(config: Config) -> int:
    return int(_zero(config).get("reduce_bucket_size", REDUCE_BUCKET))


def _offload_device(config: Config, name: str) -> Any:
    return (_zero(config).get(name) or {}).get("device")


def _second_shards(config: Config) -> int:
    """Ranks that ZeRO++'s hpZ shards weights over again; 1 is none."""
    return _zero(config).get("zero_hpz_partition_size", 1)


def _zero(config: Config) -> dict[str, Any]:
    return config.deepspeed.get("zero_optimization", {})


def _residents(plan: Plan) -> frozenset[Tenant]:
    """The set whose staying saves the most copied bytes in every phase's room; the engine stays where it fits too."""
    assert plan.device_bytes, "auto needs a device to fill"
    usable = int(plan.device_bytes * (1 - MARGIN))
    free = plan.residents | {t for t, size in plan.tenants.items() if not size}
    movable = [t for t in (*POLICY, Tenant.REFERENCE) if t not in free]
    best: tuple[tuple[int, int], frozenset[Tenant]] = ((-1, -1), frozenset())
    for engine in (frozenset(ENGINE), frozenset[Tenant]()):
        for chosen in chain.from_iterable(combinations(movable, count) for count in range(len(movable) + 1)):
            trial = replace(plan, residents=free | engine | frozenset(chosen))
            value = (sum(plan.tenants[t] for t in chosen), len(engine))
            if value > best[0] and all(trial.total(phase) <= usable for phase in PHASES):
                best = (value, trial.residents)
    return best[1]


def _remedy(config: Config, phase: str, shares: bool) -> str:
    p = config.policy
    found = []
    if config.memory.swap == "never":
        found.append("set memory.swap auto")
    if phase == "rollout":
        found.append(f"lower rollout.gpu_memory_utilization ({config.rollout.gpu_memory_utilization})"
                     if not config.rollout.kv_cache_gib else
                     f"lower rollout.kv_cache_gib ({config.rollout.kv_cache_gib})")
        found.append("raise rollout.tensor_parallel_size")
    if phase in ("train", "reference"):
        if not p.gradient_checkpointing:
            found.append("set policy.gradient_checkpointing true")
        found.append(f"lower batch.max_tokens_per_microbatch ({config.batch.max_tokens_per_microbatch}) or "
                     f"policy.logprob_memory_gib ({p.logprob_memory_gib})")
    if phase == "reference" and shares:
        found.append("set weight_sync.transport ipc, so that the policy's weights leave")
    if phase == "sync":
        found.append(f"lower weight_sync.bucket_mib ({config.weight_sync.bucket_mib})")
    if p.zero_stage < 3:
        found.append(f"raise policy.zero_stage ({p.zero_stage}) on several GPUs")
    if phase in ("train", "reference") and _second_shards(config) > 1:
        found.append("remove deepspeed.zero_optimization.zero_hpz_partition_size")
    if phase == "train":
        found.append("set deepspeed.zero_optimization.offload_optimizer.device cpu")
    return ", ".join(found)
