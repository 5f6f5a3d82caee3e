"""Every option of the program: one dataclass a module, in the order of the step.

A run is described by a YAML file over these defaults and by dotted options over the file
(``--rollout.temperature 0.8``). ``parse`` reads them, ``validate`` refuses what contradicts itself.
Nothing heavy is imported here, so that a typing error costs no start of an engine.
"""

import importlib
import importlib.util
import math
import os
import re
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

import jsonargparse
import yaml

jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)


class ConfigError(ValueError):
    """An option that cannot be used: the message names the field, its value and what to set."""


@dataclass
class RunConfig:
    """The run as a whole."""

    output_dir: str = "runs/default"
    """Folder of metrics, checkpoints and the resolved config."""
    seed: int = 0
    """Seed of the data order, of every sampling request and of the trainer's generators."""
    max_steps: int = 100
    """Number of steps: one rollout and its update each."""
    max_train_minutes: float = 0.0
    """End after the step in which so many minutes since the program's start are over, with a checkpoint; 0 does not."""


@dataclass
class MeshConfig:
    """Processes and devices."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of every rank; auto takes cuda where there is a GPU."""
    timeout_s: float = 1800.0
    """Longest time in seconds that a rank waits for the others in any collective, of any phase."""
    full_determinism: bool = False
    """Deterministic kernels only (slower); an operation that has none raises."""


@dataclass
class ModelConfig:
    """The model that is trained, sampled from, and (frozen) the reference."""

    path: str = ""
    """Hugging Face folder (or name in the local cache) with config, weights and tokenizer."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights in forward and backward and in the engine; bfloat16 keeps fp32 masters."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder."""


@dataclass
class DataConfig:
    """Prompts."""

    train: str = ""
    """JSONL file: a `prompt` (text or messages) a line; other columns go to the rewards."""
    eval: str | None = None
    """Held-out JSONL file of the same form."""
    shuffle: bool = True
    """Another order each epoch, from run.seed; false keeps the file's order."""
    max_prompt_length: int = 512
    """Longest prompt in tokens after the template; longer rows are dropped, counted and reported."""
    system_prompt: str | None = None
    """Put before the messages of a row that has no system message; a text prompt is left as it is."""


@dataclass
class RolloutConfig:
    """Sampling by vLLM."""

    num_generations: int = 8
    """Completions of each prompt: the group that advantages compare."""
    max_completion_length: int = 256
    """Longest completion in tokens."""
    temperature: float = 1.0
    """Sampling temperature; the policy's log-probs are taken at the same one. Above 0."""
    top_p: float = 1.0
    """Nucleus sampling: below 1 the sampler's log-probs are those of the truncated set."""
    top_k: int = 0
    """Sample among this many likeliest tokens; 0 is all."""
    min_p: float = 0.0
    """Drop tokens below this share of the likeliest one's probability."""
    repetition_penalty: float = 1.0
    """Above 1 punishes tokens seen before."""
    presence_penalty: float = 0.0
    """Above 0 punishes tokens that occurred in the completion."""
    frequency_penalty: float = 0.0
    """Above 0 punishes tokens by how often they occurred in the completion."""
    min_tokens: int = 0
    """No end of sequence before this many tokens."""
    ignore_eos: bool = False
    """Sample on past the end of sequence up to max_completion_length."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a completion."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Token ids that end a completion, beside the tokenizer's end of sequence."""
    tensor_parallel_size: int = 1
    """Neighbouring ranks that form one engine."""
    gpu_memory_utilization: float = 0.5
    """Share of the GPU that the engine may take in the rollout phase."""
    enforce_eager: bool = False
    """No compilation and no CUDA graphs in the engine: a faster start, slower sampling."""
    resample_rounds: int = 0
    """Rounds of new prompts for groups whose rewards are all equal (DAPO's dynamic sampling); 0 keeps such groups."""
    cpu_kv_cache_gib: int = 1
    """KV cache in GiB where the engine runs on a CPU."""


@dataclass
class RewardsConfig:
    """Scoring of completions."""

    functions: list[str] = field(default_factory=lambda: ["exact_match"])
    """exact_match, regex, math_verify, reasoning_gym, soft_overlong, or the user's own as module:function."""
    weights: list[float] | None = None
    """Weight of each function in the sum; all 1 if absent."""
    answer_column: str = "answer"
    """Column with the right answer, for exact_match and math_verify."""
    regex_pattern: str | None = None
    """Pattern that the regex reward searches for in a completion (re.DOTALL)."""
    overlong_buffer: int = 0
    """Last tokens before rollout.max_completion_length over which soft_overlong falls from 0 to -1 (DAPO)."""


@dataclass
class AdvantagesConfig:
    """From rewards to advantages."""

    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What is taken off a reward: its group's mean, or the mean of the group's others (RLOO)."""
    scale_rewards: Literal["group", "batch", "whiten", "none"] = "group"
    """Divide by the sample standard deviation of the group's or the batch's rewards, bring the batch's differences to
    mean 0 and deviation 1 (REINFORCE++ with baseline), or none of it."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Several rewards: weigh and add them first, or normalise each within its groups and then add."""
    function: str | None = None
    """The user's own as module:function, from (rewards, groups) to advantages; replaces the built-in."""


@dataclass
class BatchConfig:
    """How a step's completions become micro-batches."""

    prompts_per_step: int = 64
    """Prompts of a step over all ranks; each gives rollout.num_generations completions."""
    num_minibatches: int = 1
    """Parts of a rollout, by prompts, with an optimizer step each."""
    max_tokens_per_microbatch: int = 16384
    """Token budget of one packed row; a longer sequence gets a row of its own."""


@dataclass
class LossConfig:
    """The objective."""

    loss_type: str = "dapo"
    """dapo (clipped, mean over the step's tokens), grpo (clipped, mean of the completions' means), dr_grpo (clipped, by
    the constant rollout.max_completion_length), cispo, sapo, or the user's own token loss as module:function."""
    importance_sampling_level: Literal["token", "sequence", "sequence_token"] = "token"
    """Ratio of policy to old policy: of each token, of the completion (GSPO), or that with each token's gradient."""
    epsilon: float = 0.2
    """Clip range of the ratio below 1."""
    epsilon_high: float | None = None
    """Clip range of the ratio above 1, epsilon if absent; for cispo the largest ratio itself, 5.0 say."""
    delta: float | None = None
    """Largest ratio on the unclipped side, above 1 + epsilon_high; absent is unbounded."""
    dual_clip: float | None = None
    """Largest loss of a token with a negative advantage, in advantages, above 1; absent is unbounded."""
    sapo_temperature_pos: float = 1.0
    """sapo's temperature for positive advantages."""
    sapo_temperature_neg: float = 1.05
    """sapo's temperature for the others."""
    beta: float = 0.0
    """Coefficient of the KL to the reference; 0 builds no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL (Schulman 2020)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL counts: in the loss, or taken off a completion's reward before its advantage."""
    use_bias_correction_kl: bool = True
    """Weigh the KL in the loss by the ratio: with k3 its gradient is then that of the reverse KL (DeepSeek-V3.2)."""
    ref_model_sync_steps: int = 0
    """Move the reference towards the policy every so many steps; 0 never."""
    ref_model_mixup_alpha: float = 0.6
    """Share of the policy in the new reference; 1 replaces it."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus: the mean entropy of the step's tokens, with gradient."""
    top_entropy_quantile: float = 1.0
    """Share of tokens, those of highest entropy, that the token loss is taken over; 1 is all."""
    mask_truncated_completions: bool = False
    """Leave completions that reached the limit out of the loss and its counts."""
    num_iterations: int = 1
    """Passes over a rollout."""
    recompute_old_logprobs: bool = False
    """A pass of its own for old_logprobs also where a rollout has one update; else the current ones serve, detached."""
    importance_sampling_correction: bool = True
    """Weigh tokens by policy over sampler, whose numerics differ."""
    importance_sampling_mode: Literal["token_truncate", "token_mask", "sequence_truncate",
                                      "sequence_mask"] = "sequence_mask"
    """That ratio of a token or of a completion; beyond the bounds truncated to them, or 0."""
    importance_sampling_clip_max: float | None = 3.0
    """Upper bound of that ratio; null is none."""
    importance_sampling_clip_min: float | None = None
    """Lower bound of that ratio; null is none."""


@dataclass
class PolicyConfig:
    """The DeepSpeed engine."""

    zero_stage: Literal[0, 1, 2, 3] = 2
    """ZeRO stage: what is sharded over the ranks (1 optimizer, 2 and gradients, 3 and weights)."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """torch's fused AdamW, or plain SGD without momentum."""
    learning_rate: float = 1e-6
    """Peak learning rate."""
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine"] = "constant"
    """Schedule over run.max_steps, as in Transformers."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up, the first at a learning rate of 0; constant has none."""
    weight_decay: float = 0.0
    """Decoupled weight decay of AdamW."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.999
    """Decay of the second moment."""
    adam_epsilon: float = 1e-8
    """Added to the root of the second moment."""
    max_grad_norm: float = 1.0
    """Global gradient norm is clipped to this; 0 does not clip."""
    max_nonfinite_steps: int = 3
    """A gradient that is not finite skips its optimizer step; this many in a row end the run."""
    gradient_checkpointing: bool = True
    """Recompute each block's activations in backward."""
    logprob_memory_gib: float = 1.0
    """Memory for the tiles of logits in GiB: all logits never exist at once."""


@dataclass
class MemoryConfig:
    """Who is on the GPU in which phase."""

    swap: Literal["engine", "never"] = "engine"
    """engine: vLLM sleeps (level 2) while the policy trains; never: both stay."""


@dataclass
class WeightSyncConfig:
    """From the policy's weights to the engine's."""

    bucket_mib: int = 512
    """Weights gathered at once from ZeRO-3 shards, in MiB; a larger tensor is a bucket of its own."""


@dataclass
class CheckpointConfig:
    """What is written."""

    export_steps: int = 0
    """Write a Hugging Face folder every so many steps; 0 only at the end."""
    max_shard_gib: float = 4.0
    """Largest safetensors file of an export in GiB."""
    save_steps: int = 0
    """Write a resumable checkpoint every so many steps and after the last; 0 only when a signal or
    run.max_train_minutes ends the run."""
    keep: int = 2
    """Resumable checkpoints that stay, the newest ones."""
    resume: str = "auto"
    """auto goes on from the folder's newest whole checkpoint, never moves an earlier run's files aside and starts
    anew; else the folder of a checkpoint."""


@dataclass
class EvaluateConfig:
    """Greedy sampling on data.eval, scored by the same rewards."""

    eval_steps: int = 0
    """Evaluate every so many steps; 0 only before the first and after the last."""


@dataclass
class MetricsConfig:
    """Where metrics go; metrics.jsonl is always written."""

    tensorboard: bool = True
    """Write TensorBoard events under output_dir/tensorboard."""


@dataclass
class Config:
    """All sections; see each."""

    run: RunConfig = field(default_factory=RunConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    advantages: AdvantagesConfig = field(default_factory=AdvantagesConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """Raw DeepSpeed options, merged into the config that policy builds."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """Raw arguments of vllm.LLM."""

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of one rollout."""
        return self.loss.num_iterations * self.batch.num_minibatches

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether old_logprobs (and entropies) need a pass of their own before the update."""
        loss = self.loss
        return (loss.recompute_old_logprobs or self.updates_per_step > 1 or loss.top_entropy_quantile < 1
                or (loss.beta > 0 and loss.kl_in == "reward"))

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens: prompt and completion."""
        return self.data.max_prompt_length + self.rollout.max_completion_length


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
REFUSED_ZERO = ("zero_optimization.zero_hpz_partition_size", "zero_optimization.mics_shard_size")
LOSS_TYPES = ("dapo", "grpo", "dr_grpo", "cispo", "sapo")
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def parse(args: list[str] | None = None, prog: str = "spmd_rl.train") -> tuple[Config, bool]:
    """Read the options of the command line; returns (config, dry_run).

    Prints and exits for ``--help`` and ``--print_config``. Raises ConfigError for an unknown key, a
    wrong type or a file that cannot be read.
    """
    parser = jsonargparse.ArgumentParser(prog=prog, exit_on_error=False, allow_abbrev=False,
                                         description="GRPO post-training of a language model, one SPMD program.")
    parser.add_argument("--config", action="config", help="YAML file; later options win over it")
    parser.add_argument("--dry_run", type=bool, nargs="?", const=True, default=False,
                        help="check everything that needs no weights, print the batch arithmetic, exit")
    for section in fields(Config):
        if is_dataclass(section.default_factory):
            parser.add_class_arguments(section.default_factory, section.name)  # type: ignore[arg-type]
        else:
            parser.add_argument(f"--{section.name}", type=dict[str, Any], default={},
                                help=f"raw options for {section.name}, as --{section.name}.KEY VALUE")
    raw = _raw_sections(sys.argv[1:] if args is None else args)
    try:
        namespace = parser.parse_args(args)
    except (jsonargparse.ArgumentError, TypeError, ValueError, OSError) as error:
        raise ConfigError(f"{error}\nSee --help for the options and --print_config for their values.") from None
    sections: dict[str, Any] = {}
    for section in fields(Config):
        if is_dataclass(section.default_factory):
            sections[section.name] = _section(section.name, section.default_factory, namespace[section.name])
        else:
            sections[section.name] = raw[section.name]
    return Config(**sections), namespace.dry_run


def _section(name: str, make: Any, given: Any) -> Any:
    """The section's dataclass. Raises ConfigError for what the parser lets through: no mapping, or null for a value."""
    if not isinstance(given, jsonargparse.Namespace):
        raise ConfigError(f"{name} is {given!r}: give its options below it")
    hints = typing.get_type_hints(make)
    for key, value in vars(given).items():
        if value is None and type(None) not in typing.get_args(hints[key]):
            raise ConfigError(f"{name}.{key} is null: leave it out for its default, {getattr(make(), key)!r}")
    return make(**vars(given))


class _YamlLoader(yaml.SafeLoader):
    """Reads 1e-4 as a number, as the parser does (YAML 1.1 wants 1.0e-4)."""


_YamlLoader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
                                  list("-+0123456789"))


def _raw_sections(args: list[str]) -> dict[str, dict[str, Any]]:
    """The raw sections as YAML has them, files and dotted options in order.

    Read again here: the parser turns a quoted "7" of a file into a number, and leaves a nested 7 of the command
    line text.
    """
    raw: dict[str, dict[str, Any]] = {section.name: {} for section in fields(Config)
                                      if not is_dataclass(section.default_factory)}
    for arg, following in zip(args, [*args[1:], ""]):
        option, has_value, value = arg.partition("=")
        value = value if has_value else following
        section, _, path = option.removeprefix("--").partition(".")
        if option == "--config":
            given = _read_yaml(value)
            for name in raw:
                section_of_file = given.get(name) or {}
                if not isinstance(section_of_file, dict):
                    raise ConfigError(f"{name} is {section_of_file!r}: give its options below it")
                raw[name] = _merged(raw[name], section_of_file)
        elif option.startswith("--") and section in raw:
            tree: Any = yaml.load(value, _YamlLoader)
            for key in reversed(path.split(".") if path else []):
                tree = {key: tree}
            raw[section] = _merged(raw[section], tree or {})
    return raw


def _read_yaml(path: str) -> dict[str, Any]:
    """The file's mapping. Raises ConfigError that names the file."""
    try:
        with open(path, encoding="utf-8") as file:
            given = yaml.load(file, _YamlLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: {error}") from None
    if not isinstance(given, dict | None):
        raise ConfigError(f"--config {path}: a {type(given).__name__}, not sections with options")
    return given or {}


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both else value
    return result


def as_dict(config: Config) -> dict[str, Any]:
    """Plain nested dictionaries, in the order of the sections."""
    return {s.name: dict(vars(v)) if is_dataclass(v := getattr(config, s.name)) else v for s in fields(config)}


def validate(config: Config, world_size: int) -> None:
    """Refuse, before anything is loaded, what cannot run. Raises ConfigError.

    world_size: number of ranks of the job.
    """
    _check_ranges(config)
    _check_division(config, world_size)
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
    _require(bool(c.data.train), "data.train", c.data.train, "set it to a JSONL file with a `prompt` a line")
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
        "loss.ref_model_sync_steps": c.loss.ref_model_sync_steps, "rewards.overlong_buffer": c.rewards.overlong_buffer,
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
    for name, beta in (("policy.adam_beta1", p.adam_beta1), ("policy.adam_beta2", p.adam_beta2)):
        _require(0 <= beta < 1, name, beta, "set it to 0 or more and below 1")
    _require(c.run.seed < 2**32, "run.seed", c.run.seed, "set it below 2**32")
    _require("" not in r.stop, "rollout.stop", r.stop, "an empty text ends every completion at once; remove it")
    _require(bool(c.rewards.functions), "rewards.functions", c.rewards.functions, "name at least one")
    weights = c.rewards.weights
    _require(weights is None or len(weights) == len(c.rewards.functions), "rewards.weights", weights,
             f"give one for each of the {len(c.rewards.functions)} rewards.functions")
    _require("regex" not in c.rewards.functions or bool(c.rewards.regex_pattern), "rewards.regex_pattern",
             c.rewards.regex_pattern, "set the pattern that the regex reward searches for")
    _require(c.evaluate.eval_steps == 0 or bool(c.data.eval), "evaluate.eval_steps", c.evaluate.eval_steps,
             "set data.eval to a held-out JSONL file, or eval_steps to 0")


def _check_loss(c: Config) -> None:
    loss, r = c.loss, c.rollout
    _require(loss.loss_type != "bnpo", "loss.loss_type", loss.loss_type,
             "it normalises by each micro-batch, so the result depends on how the batch is cut; set dapo")
    _require(loss.loss_type in LOSS_TYPES or ":" in loss.loss_type, "loss.loss_type", loss.loss_type,
             f"set {', '.join(LOSS_TYPES)}, or your own as module:function")
    high = loss.epsilon if loss.epsilon_high is None else loss.epsilon_high
    _require(loss.loss_type != "cispo" or high >= 1, "loss.epsilon_high", loss.epsilon_high,
             "for cispo it is the largest ratio itself: set 1 or more, such as 5.0")
    _require(loss.delta is None or loss.delta > 1 + high, "loss.delta", loss.delta,
             f"set it above 1 + epsilon_high, {1 + high:g}")
    _require(loss.dual_clip is None or loss.dual_clip > 1, "loss.dual_clip", loss.dual_clip, "set it above 1")
    clipped = loss.loss_type not in ("cispo", "sapo")
    for name in ("delta", "dual_clip"):
        _require(clipped or getattr(loss, name) is None, f"loss.{name}", getattr(loss, name),
                 f"{loss.loss_type} has no clip that it could bound; leave it out")
    _require(0 < loss.top_entropy_quantile <= 1, "loss.top_entropy_quantile", loss.top_entropy_quantile,
             "set it above 0 and at most 1")
    _require(0 < loss.ref_model_mixup_alpha <= 1, "loss.ref_model_mixup_alpha", loss.ref_model_mixup_alpha,
             "set it above 0 and at most 1")
    _require(loss.beta > 0 or loss.ref_model_sync_steps == 0, "loss.ref_model_sync_steps", loss.ref_model_sync_steps,
             "there is no reference with beta 0: set beta, or 0 here")
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
            if path in REFUSED_ZERO:
                raise ConfigError(f"{section}.{path} is {value!r}: weights with a second shard are not supported; "
                                  "remove it")
            owner = next((owned[p] for p in _prefixes(path) if p in owned), None)
            if owner:
                raise ConfigError(f"{section}.{path} is {value!r}: set by {owner}; set that and remove this")


def _asks_for_nothing(value: Any) -> bool:
    """No LoRA, a size of 0 or 1; but True, which equals 1, asks for something."""
    return value is not True and value in (None, False, 0, 1, "", {})


def _check_files(c: Config) -> None:
    for name, path in (("data.train", c.data.train), ("data.eval", c.data.eval)):
        if path is not None:
            _require(os.path.isfile(path), name, path, "no such file; set it to a JSONL file")
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


def load_function(name: str, field: str) -> Callable[..., Any]:
    """The user's own function from ``module:function`` or ``path/to/file.py:function``.

    Raises ConfigError that names `field` where there is none; an error inside the module is shown as it is.
    """
    module_name, _, function_name = name.rpartition(":")
    if not module_name or not function_name:
        raise ConfigError(f"{field} has {name!r}: write module:function, or path/to/file.py:function")
    if module_name.endswith(".py"):
        if not os.path.isfile(module_name):
            raise ConfigError(f"{field} has {name!r}: no file {module_name}")
        # A name of its own: a file called json.py must not take the library's place.
        own_name = f"spmd_rl_user_{os.path.basename(module_name)[:-3]}"
        spec = importlib.util.spec_from_file_location(own_name, module_name)
        assert spec and spec.loader, f"no loader for {module_name}"
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # a console script does not look in the working directory by itself
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # the module is there, and misses another
            where = f"on the path or in {os.getcwd()}"
            raise ConfigError(f"{field} has {name!r}: no module {module_name} {where}") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{field} has {name!r}: {module_name} has no function {function_name!r}")
    return function
