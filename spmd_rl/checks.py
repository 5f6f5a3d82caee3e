"""What a config must hold before anything is loaded: ranges, division, raw options, files, the allocator.

Each refusal names the field, its value and what to set.
"""

import math
import os
from typing import Any

from spmd_rl.config import Config, ConfigError, as_dict
from spmd_rl.losses import LOSSES, clipped_tokens
from spmd_rl.profiling import profiled_steps
from spmd_rl.rows import is_hub_name
from spmd_rl.sinks import check as check_sinks

# A raw option that one of our fields decides: option -> field. Nested DeepSpeed keys are dotted.
DEEPSPEED_OWNED = {
    "zero_optimization.stage": "policy.zero_stage",
    "zero_optimization.memory_efficient_linear": "the program (it patches torch.nn.functional.linear for vLLM too)",
    "optimizer": "policy.optimizer",
    "scheduler": "policy.lr_scheduler_type",
    "gradient_clipping": "policy.max_grad_norm",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "amp": "model.dtype",
    "torch_autocast": "model.dtype",
    "train_batch_size": "batch.prompts_per_step",
    "train_micro_batch_size_per_gpu": "batch.max_tokens_per_microbatch",
    "gradient_accumulation_steps": "batch.max_tokens_per_microbatch",
}
VLLM_OWNED = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "enforce_eager": "rollout.enforce_eager",
    "max_model_len": "data.max_prompt_length and rollout.max_completion_length",
    "seed": "run.seed",
    "load_format": "the program (weights come from the policy)",
    "distributed_executor_backend": "the program (external_launcher)",
    "enable_sleep_mode": "memory.swap",
    "logprobs_mode": "the program (processed_logprobs)",
    "generation_config": "the rollout section",
    "hf_overrides": "the program (the engine's model must be the policy's)",
}
REFUSED_RAW = {
    "vllm.enable_lora": "LoRA",
    "vllm.data_parallel_size": "samplers on other GPUs",
    "vllm.pipeline_parallel_size": "pipeline parallelism",
    "vllm.enable_expert_parallel": "mixture-of-experts models",
    "vllm.quantization": "quantised engines",
    "vllm.weight_transfer_config": "vLLM's own weight transfer",
    "deepspeed.sequence_parallel_size": "sequence parallelism",
    "deepspeed.tensor_parallel": "tensor-parallel training",
}
REFUSED_ZERO = {
    "zero_optimization.mics_shard_size": "weights that are sharded within groups of ranks only are not supported",
    "zero_optimization.zero_quantized_weights": "the policy would compute with other weights than the sampler",
    "zero_optimization.zero_quantized_nontrainable_weights": "the reference would compute with other weights than its "
                                                             "own",
}
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def validate(config: Config, world_size: int) -> None:
    """Refuse, before anything is loaded, what cannot run. Raises ConfigError.

    world_size: number of ranks of the job.
    """
    _check_ranges(config)
    _check_division(config, world_size)
    _check_raw(config)
    check_second_shards(config, world_size)
    _check_files(config)
    _check_allocator()


def sampler_differences(config: Config) -> list[str]:
    """Options in force that make the sampler's distribution another one than the policy's, as "rollout.top_p 0.9"."""
    r = config.rollout
    values: dict[str, tuple[Any, Any]] = {  # in force, and what changes nothing
        "top_p": (r.top_p, 1.0), "top_k": (r.top_k, 0), "min_p": (r.min_p, 0.0), "min_tokens": (r.min_tokens, 0),
        "repetition_penalty": (r.repetition_penalty, 1.0), "presence_penalty": (r.presence_penalty, 0.0),
        "frequency_penalty": (r.frequency_penalty, 0.0)}
    return [f"rollout.{name} {value:g}" for name, (value, neutral) in values.items() if value != neutral]


def validate_saved(config: Config, world_size: int) -> None:
    """The same for a command that uses a saved model and trains nothing. Raises ConfigError."""
    _require(bool(config.model.path), "model.path", config.model.path, "set it to a Hugging Face model folder")
    tp = config.rollout.tensor_parallel_size
    _require(tp > 0 and world_size % tp == 0, "rollout.tensor_parallel_size", tp,
             f"it must divide the number of ranks, {world_size}")
    _check_sampling(config)
    _check_raw(config)
    _check_files(config)
    _check_allocator()


def _require(good: bool, field_name: str, value: Any, fix: str) -> None:
    if not good:
        raise ConfigError(f"{field_name} is {value!r}: {fix}")


def _check_ranges(c: Config) -> None:
    r = c.rollout
    for section, values in as_dict(c).items():
        for key, value in values.items():
            _require(not isinstance(value, float) or math.isfinite(value), f"{section}.{key}", value,
                     "set a finite number")
    _require(bool(c.model.path), "model.path", c.model.path, "set it to a Hugging Face model folder")
    _require(bool(c.run.replay) or (all(c.train_sets) and bool(c.train_sets)), "data.train", c.data.train,
             "set it to a JSONL file with a `prompt` a line (or another form of data set)")
    mixed = c.data.weights
    _require(mixed is None or len(mixed) == len(c.train_sets), "data.weights", mixed,
             f"give one for each of the {len(c.train_sets)} data.train")
    _require(mixed is None or all(math.isfinite(w) and w > 0 for w in mixed), "data.weights", mixed, "set each above 0")
    positive = {
        "run.max_steps": c.run.max_steps, "mesh.timeout_s": c.mesh.timeout_s,
        "data.max_prompt_length": c.data.max_prompt_length, "rollout.num_generations": r.num_generations,
        "rollout.max_completion_length": r.max_completion_length,
        "rollout.tensor_parallel_size": r.tensor_parallel_size, "batch.prompts_per_step": c.batch.prompts_per_step,
        "batch.max_tokens_per_microbatch": c.batch.max_tokens_per_microbatch,
        "policy.logprob_memory_gib": c.policy.logprob_memory_gib, "weight_sync.bucket_mib": c.weight_sync.bucket_mib,
        "checkpoint.max_shard_gib": c.checkpoint.max_shard_gib, "rollout.cpu_kv_cache_gib": r.cpu_kv_cache_gib,
        "rollout.repetition_penalty": r.repetition_penalty, "loss.num_iterations": c.loss.num_iterations,
        "batch.num_minibatches": c.batch.num_minibatches, "policy.max_nonfinite_steps": c.policy.max_nonfinite_steps,
        "loss.sapo_temperature_pos": c.loss.sapo_temperature_pos,
        "loss.sapo_temperature_neg": c.loss.sapo_temperature_neg, "checkpoint.keep": c.checkpoint.keep,
        "rewards.timeout_s": c.rewards.timeout_s, "rewards.memory_gib": c.rewards.memory_gib,
        "metrics.num_completions": c.metrics.num_completions,
        "policy.gradient_checkpointing_every": c.policy.gradient_checkpointing_every,
    }
    for name, value in positive.items():
        _require(value > 0, name, value, "set it above 0")
    not_negative = {
        "run.seed": c.run.seed, "policy.learning_rate": c.policy.learning_rate, "loss.beta": c.loss.beta,
        "policy.max_grad_norm": c.policy.max_grad_norm, "policy.warmup_steps": c.policy.warmup_steps,
        "policy.weight_decay": c.policy.weight_decay, "checkpoint.export_steps": c.checkpoint.export_steps,
        "checkpoint.save_steps": c.checkpoint.save_steps, "run.max_train_minutes": c.run.max_train_minutes,
        "evaluate.eval_steps": c.evaluate.eval_steps, "rollout.top_k": r.top_k, "rollout.min_tokens": r.min_tokens,
        "rollout.resample_rounds": r.resample_rounds, "loss.entropy_coef": c.loss.entropy_coef,
        "metrics.peak_tflops": c.metrics.peak_tflops,
        "loss.ref_model_sync_steps": c.loss.ref_model_sync_steps, "rewards.overlong_buffer": c.rewards.overlong_buffer,
        "rewards.num_workers": c.rewards.num_workers, "metrics.completions_steps": c.metrics.completions_steps,
    }
    for name, value in not_negative.items():
        _require(value >= 0, name, value, "set it to 0 or more")
    _require(r.temperature > 0, "rollout.temperature", r.temperature,
             "training needs a distribution to sample from: set it above 0 (evaluation is greedy by itself)")
    _require(0 < r.top_p <= 1, "rollout.top_p", r.top_p, "set it above 0 and at most 1")
    _require(0 <= r.min_p <= 1, "rollout.min_p", r.min_p, "set it between 0 and 1")
    _require(0 < r.gpu_memory_utilization < 1, "rollout.gpu_memory_utilization", r.gpu_memory_utilization,
             "set it between 0 and 1")
    _require(r.min_tokens <= r.max_completion_length, "rollout.min_tokens", r.min_tokens,
             f"set it to at most rollout.max_completion_length, {r.max_completion_length}")
    _require(0 <= c.loss.epsilon < 1, "loss.epsilon", c.loss.epsilon, "set it to 0 or more and below 1")
    _require(c.loss.epsilon_high is None or c.loss.epsilon_high >= 0, "loss.epsilon_high", c.loss.epsilon_high,
             "set it to 0 or more")
    _require(c.advantages.scale_rewards == "none" or r.num_generations > 1 or bool(c.advantages.function),
             "rollout.num_generations", r.num_generations,
             "a group of one has no deviation from itself: set 2 or more, or advantages.scale_rewards: none")
    _check_loss(c)
    updates, p = c.run.max_steps * c.updates_per_step, c.policy
    _require(p.warmup_steps == 0 or p.lr_scheduler_type != "constant", "policy.warmup_steps", p.warmup_steps,
             "the constant schedule has none: set policy.lr_scheduler_type constant_with_warmup, or 0 here")
    _require(p.warmup_steps < updates, "policy.warmup_steps", p.warmup_steps,
             f"the peak would never be reached in the run's {updates} optimizer steps; set fewer")
    _require(not (c.run.replay and c.run.record_rollouts), "run.record_rollouts", True,
             "a replay samples nothing that could be recorded: leave out one of the two")
    for name, beta in (("policy.adam_beta1", p.adam_beta1), ("policy.adam_beta2", p.adam_beta2)):
        _require(0 <= beta < 1, name, beta, "set it to 0 or more and below 1")
    _require(c.run.seed < 2**32, "run.seed", c.run.seed, "set it below 2**32")
    _require("" not in r.stop, "rollout.stop", r.stop, "an empty text ends every completion at once; remove it")
    _check_sampling(c)
    check_sinks(c.metrics)
    profiled_steps(c.run.profile_steps)
    _require(c.evaluate.eval_steps == 0 or bool(c.data.eval), "evaluate.eval_steps", c.evaluate.eval_steps,
             "set data.eval to a held-out set, or eval_steps to 0")


def _check_sampling(c: Config) -> None:
    e, longest = c.evaluate, c.rollout.max_completion_length
    _require(bool(c.rewards.functions), "rewards.functions", c.rewards.functions, "name at least one")
    weights = c.rewards.weights
    _require(weights is None or len(weights) == len(c.rewards.functions), "rewards.weights", weights,
             f"give one for each of the {len(c.rewards.functions)} rewards.functions")
    _require(weights is None or all(map(math.isfinite, weights)), "rewards.weights", weights, "set finite numbers")
    ours = sorted(c.data.chat_template_kwargs.keys() & {"conversation", "tokenize", "add_generation_prompt"})
    _require(not ours, "data.chat_template_kwargs", c.data.chat_template_kwargs,
             f"remove {', '.join(ours)}: the program gives it")
    _require("regex" not in c.rewards.functions or bool(c.rewards.regex_pattern), "rewards.regex_pattern",
             c.rewards.regex_pattern, "set the pattern that the regex reward searches for")
    _require(e.num_generations > 0, "evaluate.num_generations", e.num_generations, "set it above 0")
    _require(e.temperature >= 0, "evaluate.temperature", e.temperature, "set it to 0 or more")
    _require(e.num_generations == 1 or e.temperature > 0, "evaluate.temperature", e.temperature,
             "several greedy completions are all the same: set it above 0, or evaluate.num_generations to 1")
    _require(e.max_completion_length is None or 0 < e.max_completion_length <= longest,
             "evaluate.max_completion_length", e.max_completion_length,
             f"set it above 0 and at most rollout.max_completion_length, {longest}")


def _check_loss(c: Config) -> None:
    loss, r = c.loss, c.rollout
    _require(loss.loss_type != "bnpo", "loss.loss_type", loss.loss_type,
             "it normalises by each micro-batch, so the result depends on how the batch is cut; set dapo")
    _require(loss.loss_type in LOSSES or ":" in loss.loss_type, "loss.loss_type", loss.loss_type,
             f"set {', '.join(LOSSES)}, or your own as module:function")
    high = loss.epsilon if loss.epsilon_high is None else loss.epsilon_high
    _require(loss.loss_type != "cispo" or high >= 1, "loss.epsilon_high", loss.epsilon_high,
             "for cispo it is the largest ratio itself: set 1 or more, such as 5.0")
    _require(loss.delta is None or loss.delta > 1 + high, "loss.delta", loss.delta,
             f"set it above 1 + epsilon_high, {1 + high:g}")
    _require(loss.dual_clip is None or loss.dual_clip > 1, "loss.dual_clip", loss.dual_clip, "set it above 1")
    clipped = loss.loss_type not in LOSSES or LOSSES[loss.loss_type].clip_metrics is clipped_tokens
    for name in ("delta", "dual_clip"):
        _require(clipped or getattr(loss, name) is None, f"loss.{name}", getattr(loss, name),
                 f"{loss.loss_type} has no clip that it could bound; leave it out")
    _require(0 < loss.top_entropy_quantile <= 1, "loss.top_entropy_quantile", loss.top_entropy_quantile,
             "set it above 0 and at most 1")
    _require(0 < loss.ref_model_mixup_alpha <= 1, "loss.ref_model_mixup_alpha", loss.ref_model_mixup_alpha,
             "set it above 0 and at most 1")
    _require(loss.beta > 0 or loss.ref_model_sync_steps == 0, "loss.ref_model_sync_steps", loss.ref_model_sync_steps,
             "there is no reference with beta 0: set beta, or 0 here")
    in_loss = loss.beta > 0 and loss.kl_in == "loss"
    _require(not in_loss or loss.kl_estimator != "k2" or not loss.use_bias_correction_kl, "loss.use_bias_correction_kl",
             True, "weighed by the ratio k2's gradient is no KL's: set it to false, or loss.kl_estimator k3")
    _require(not in_loss or loss.kl_estimator != "k1" or loss.use_bias_correction_kl, "loss.kl_estimator", "k1",
             "in the loss its gradient is 0 in the mean: set use_bias_correction_kl true, loss.kl_in reward, or k3")
    low, top = loss.importance_sampling_clip_min, loss.importance_sampling_clip_max
    _require(low is None or 0 <= low <= (top if top is not None else low), "loss.importance_sampling_clip_min", low,
             f"set it to 0 or more and at most importance_sampling_clip_max, {top}")
    _require(top is None or top > 0, "loss.importance_sampling_clip_max", top, "set it above 0, or null for no bound")
    per_function = c.advantages.multi_objective_aggregation == "normalize_then_sum"
    _require(not per_function or (c.advantages.baseline, c.advantages.scale_rewards) == ("mean", "group"),
             "advantages.multi_objective_aggregation", "normalize_then_sum",
             "it has its own baseline and scale: leave advantages.baseline and scale_rewards at their defaults")
    _require(not per_function or not (loss.beta and loss.kl_in == "reward"), "loss.kl_in", loss.kl_in,
             "a KL in the reward needs advantages.multi_objective_aggregation sum_then_normalize")
    _require(c.advantages.baseline == "mean" or r.num_generations > 1, "rollout.num_generations", r.num_generations,
             "a group of one has no others to leave in: set 2 or more, or advantages.baseline mean")
    penalised = r.repetition_penalty != 1 or r.presence_penalty != 0 or r.frequency_penalty != 0
    _require(not penalised or loss.importance_sampling_correction, "loss.importance_sampling_correction", False,
             "with penalties the sampler's distribution is not the policy's, and an uncorrected gradient is wrong: "
             "set it to true, or remove rollout's penalties")
    _require("soft_overlong" not in c.rewards.functions or 0 < c.rewards.overlong_buffer < r.max_completion_length,
             "rewards.overlong_buffer", c.rewards.overlong_buffer,
             f"set it above 0 and below rollout.max_completion_length, {r.max_completion_length}")


def _check_division(c: Config, world_size: int) -> None:
    tp = c.rollout.tensor_parallel_size
    _require(world_size % tp == 0, "rollout.tensor_parallel_size", tp,
             f"it must divide the number of ranks, {world_size}: "
             f"set one of {[d for d in range(1, world_size + 1) if world_size % d == 0]}")
    shares = c.weight_sync.transport == "shared"
    _require(not shares or tp == 1, "rollout.tensor_parallel_size", tp,
             "with weight_sync.transport shared an engine is one rank's: set 1, or transport auto")
    _require(not shares or c.policy.zero_stage < 3, "policy.zero_stage", c.policy.zero_stage,
             "with weight_sync.transport shared each rank needs whole weights: set 2 or less, or transport auto")
    engines, prompts = world_size // tp, c.batch.prompts_per_step
    _require(prompts % c.batch.num_minibatches == 0, "batch.num_minibatches", c.batch.num_minibatches,
             f"it must divide batch.prompts_per_step, {prompts}")
    below = prompts - prompts % engines
    _require(prompts % engines == 0, "batch.prompts_per_step", prompts,
             f"it must divide over the {engines} engines ({world_size} ranks / {tp} a engine): "
             f"set {' or '.join(str(n) for n in (below, below + engines) if n)}")


def _check_raw(c: Config) -> None:
    for section, owned in (("deepspeed", DEEPSPEED_OWNED), ("vllm", VLLM_OWNED)):
        for path, value in _leaves(getattr(c, section)):
            refused = REFUSED_RAW.get(f"{section}.{path.split('.')[0]}")
            if refused and not _asks_for_nothing(value):
                raise ConfigError(f"{section}.{path} is {value!r}: {refused} is not supported; remove it")
            if (section, path) == ("deepspeed", "zero_optimization"):
                raise ConfigError(f"deepspeed.zero_optimization is {value!r}: give its options below it")
            if section == "deepspeed" and path.startswith("zero_optimization.offload_") and value == "nvme":
                raise ConfigError(f"{section}.{path} is {value!r}: checkpoints are made from memory; set cpu or none")
            if path == "zero_optimization.round_robin_gradients" and value:
                raise ConfigError(f"{section}.{path} is {value!r}: DeepSpeed's own map from parameters to shards is "
                                  "wrong then, and checkpoints follow it; remove it")
            if path in REFUSED_ZERO and not _asks_for_nothing(value):
                raise ConfigError(f"{section}.{path} is {value!r}: {REFUSED_ZERO[path]}; remove it")
            owner = next((owned[p] for p in _prefixes(path) if p in owned), None)
            if owner:
                raise ConfigError(f"{section}.{path} is {value!r}: set by {owner}; set that and remove this")


def check_second_shards(c: Config, world_size: int) -> None:
    """Refuse a size of ZeRO++'s hpZ that these ranks cannot have: for whatever shards a model. Raises ConfigError."""
    name = "deepspeed.zero_optimization.zero_hpz_partition_size"
    group = c.deepspeed.get("zero_optimization", {}).get("zero_hpz_partition_size", 1)
    _require(type(group) is int and group > 0 and world_size % group == 0, name, group,
             f"it must divide the number of ranks, {world_size}: set how many a host has, or remove it")
    _require(group == 1 or c.policy.zero_stage == 3, name, group,
             "weights are sharded at policy.zero_stage 3 only: set that, or remove this")


def check_cpu_engine(c: Config) -> None:
    """Refuse what makes vLLM read parts of prompts on a CPU: requests have seeds, and it fails there."""
    why = "on a CPU the engine has to read prompts whole"
    for name in ("enable_chunked_prefill", "long_prefill_token_threshold"):
        _require(not c.vllm.get(name), f"vllm.{name}", c.vllm.get(name), f"{why}; remove it")
    tokens = c.vllm.get("max_num_batched_tokens", c.max_model_len)
    _require(isinstance(tokens, int) and tokens >= c.max_model_len, "vllm.max_num_batched_tokens", tokens,
             f"{why}: set {c.max_model_len} or more")


def _asks_for_nothing(value: Any) -> bool:
    """No LoRA, a size of 0 or 1; but True, which equals 1, asks for something."""
    return value is not True and value in (None, False, 0, 1, "", {})


def _check_files(c: Config) -> None:
    for name, paths in (("data.train", c.train_sets), ("data.eval", c.eval_sets)):
        for path in filter(None, paths if c.run.replay is None else ()):
            _require(os.path.exists(path) or is_hub_name(path) or os.path.exists(path.rpartition("@")[0]), name, path,
                     "no such file; set it to a JSONL or parquet file, a folder, or a Hugging Face data set's name")
            _require(paths.count(path) == 1, name, paths, "name each once")
    if os.path.exists(c.run.output_dir):
        _require(os.path.isdir(c.run.output_dir), "run.output_dir", c.run.output_dir, "it is a file; set a folder")


def _check_allocator() -> None:
    for name in ALLOCATOR_VARIABLES:
        for option in os.environ.get(name, "").split(","):
            key, _, value = option.partition(":")
            if key.strip() == "expandable_segments" and value.strip().lower() == "true":
                raise ConfigError(f"{name} is {os.environ[name]!r}: expandable_segments breaks memory handles and "
                                  "vLLM's sleep mode; remove that option (the others may stay)")


def _leaves(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for key, value in tree.items():
        path = f"{prefix}{key}"
        found += _leaves(value, f"{path}.") if isinstance(value, dict) and value else [(path, value)]
    return found


def _prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
