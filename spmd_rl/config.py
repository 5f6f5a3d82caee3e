"""Every option of the program: one dataclass a module, in the order of the step.

A run is described by a YAML file over these defaults and by dotted options over the file
(``--rollout.temperature 0.8``), which ``parse`` reads; ``checks`` refuses what contradicts itself.
Nothing heavy is imported here, so that a typing error costs no start of an engine.
"""

import importlib
import importlib.util
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
    record_rollouts: bool = False
    """Keep every step's completions, with rewards and advantages, in output_dir/rollouts. Short: --record_rollouts."""
    replay: str | None = None
    """Folder of recorded rollouts: learn from those alone, without an engine, from model.path. Short: --replay."""
    max_train_minutes: float = 0.0
    """End after the step in which so many minutes since the program's start are over, with a checkpoint; 0 does not."""
    profile_steps: str = ""
    """Steps to profile, as 3 or 3-5 or 3,8 (--profile for short): a trace and, on GPUs, allocator snapshot a rank."""


@dataclass
class MeshConfig:
    """Processes and devices."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of every rank; auto takes cuda where there is a GPU."""
    timeout_s: float = 1800.0
    """Longest time in seconds that a rank waits for the others in any collective, of any phase."""
    full_determinism: bool = False
    """Deterministic kernels only (slower); an operation that has none raises. See policy.compile_layers."""


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

    train: str | list[str] = ""
    """JSONL or parquet file, folder, or name of a Hugging Face data set, as NAME@SPLIT for another split than train:
    a `prompt` (text or messages) or `messages` a row; other columns go to the rewards. A list is several, one after
    the other or mixed by data.weights."""
    weights: list[float] | None = None
    """Share of each of several training sets in every step; absent, all rows count alike."""
    eval: str | list[str] | None = None
    """Held-out sets of the same forms; the default split is test."""
    subset: str | None = None
    """Subset (configuration) of a Hugging Face data set."""
    columns: dict[str, str] = field(default_factory=dict)
    """Our name -> theirs, as prompt: question; dots reach into a column, as answer: extra_info.answer."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, as enable_thinking: false."""
    skip_bad_rows: bool = False
    """Leave out and count rows that cannot be used; else the first of them ends the start with its file and line."""
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
    """Share of the GPU that the engine may take in the rollout phase for its work, its KV cache and weights of its own;
    weights that it shares with the policy come on top."""
    kv_cache_gib: float = 0.0
    """KV cache of a GPU engine in GiB; 0 is what gpu_memory_utilization leaves for it."""
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
    """exact_match, regex, think_format, math_verify, reasoning_gym, soft_overlong, length_penalty, or the user's own as
    module:function or path/to/file.py:function (verl's compute_score too)."""
    weights: list[float] | None = None
    """Weight of each function in the sum; all 1 if absent."""
    answer_column: str = "answer"
    """Column with the right answer, for exact_match and math_verify."""
    regex_pattern: str | None = None
    """Pattern that the regex reward searches for in a completion (re.DOTALL)."""
    overlong_buffer: int = 0
    """Last tokens before rollout.max_completion_length over which soft_overlong falls from 0 to -1 (DAPO)."""
    num_workers: int = 4
    """Processes a rank that score, a completion a call; 0 is the trainer's own, all of a rank's completions a call,
    without limits: for functions that compare completions."""
    timeout_s: float = 10.0
    """Longest time in seconds of a function for one completion; then its process is ended."""
    memory_gib: float = 4.0
    """Memory in GiB that a function may take in its process, beside what it has when loaded."""
    on_error: Literal["raise", "skip"] = "raise"
    """A function that raises, or returns a wrong length or type: end the run, or count it and go on."""
    failed_reward: float | None = None
    """Reward where a function has failed (time, memory, crash, NaN; errors with skip); null leaves the function out of
    that completion's sum."""


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
    shared_prompt: bool | Literal["auto"] = "auto"
    """Compute a group's prompt once for all of its completions: on, off, or auto, which does where it saves enough."""


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
    """Recompute blocks' activations in backward."""
    gradient_checkpointing_every: int = 1
    """Recompute every so-many-th block only: 2 halves the recomputation, and keeps the others' activations."""
    compile_layers: bool | None = None
    """Norms, MLP gates and rotary positions as compiled kernels; absent: on a GPU, but for mesh.full_determinism."""
    logprob_memory_gib: float = 1.0
    """Memory for the tiles of logits in GiB: all logits never exist at once."""


@dataclass
class MemoryConfig:
    """Who is on the GPU in which phase."""

    swap: Literal["auto", "always", "never"] = "auto"
    """auto: what fits beside the KV cache stays on the GPU, the rest takes turns; always: all takes turns (but weights
    that are the engine's too), vLLM asleep while the policy trains; never: all stays. On CPU auto is never."""
    device_gib: float = 0.0
    """Memory of a GPU in GiB for the plan; 0 asks the device. For --dry_run on a machine without one."""


@dataclass
class WeightSyncConfig:
    """From the policy's weights to the engine's."""

    transport: Literal["auto", "shared", "ipc", "gather"] = "auto"
    """`shared`: the engine's parameters are the policy's own memory (engines of one rank below ZeRO-3). `ipc`: copied,
    from this rank's memory and through handles from that of other ranks of the host; what lies on other hosts is
    gathered. `gather`: by collectives. `auto`: the first of them that serves; `shared` on GPUs only."""
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
    background: bool = False
    """Write beside the steps that follow: a save then blocks only for a copy to host memory, which has to hold it."""
    resume: str = "auto"
    """auto goes on from the folder's newest whole checkpoint, never moves an earlier run's files aside and starts
    anew; else the folder of a checkpoint."""


@dataclass
class EvaluateConfig:
    """Sampling on data.eval, scored by the same rewards."""

    eval_steps: int = 0
    """Evaluate every so many steps; 0 only before the first and after the last."""
    num_generations: int = 1
    """Completions of each prompt; several give pass@k for k = 1, 2, 4, ..."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    max_completion_length: int | None = None
    """Longest completion in tokens; rollout.max_completion_length if absent, which it may not exceed."""
    pass_threshold: float = 1.0
    """Value of the first reward function from which a completion is right, for pass@k."""


@dataclass
class MetricsConfig:
    """Where metrics go; metrics.jsonl is always written."""

    tensorboard: bool = True
    """Write TensorBoard events under output_dir/tensorboard."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Write to Weights & Biases; offline keeps it under output_dir/wandb for `wandb sync`."""
    wandb_project: str = "spmd_rl"
    """Its project."""
    mlflow: str | None = None
    """Address of an MLflow server, or a store such as sqlite:///mlflow.db, to write to."""
    mlflow_experiment: str = "spmd_rl"
    """Its experiment."""
    completions_steps: int = 10
    """Write completions with their rewards every so many steps and at the first, to completions.jsonl, TensorBoard and
    W&B; 0 never."""
    num_completions: int = 16
    """How many of a step's, whole groups first."""
    peak_tflops: float = 0.0
    """Peak of one device in TFLOP/s, for perf/mfu_*; 0 takes a known GPU's data sheet (bf16), elsewhere none."""


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
    def train_sets(self) -> list[str]:
        """data.train as a list."""
        return [self.data.train] if isinstance(self.data.train, str) else self.data.train

    @property
    def eval_sets(self) -> list[str]:
        """data.eval as a list."""
        return self.data.eval if isinstance(self.data.eval, list) else [self.data.eval] if self.data.eval else []

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


def parse(args: list[str] | None = None, prog: str = "spmd_rl.train") -> tuple[Config, bool]:
    """Read the options of the command line; returns (config, dry_run).

    Prints and exits for ``--help`` and ``--print_config``. Raises ConfigError for an unknown key, a
    wrong type or a file that cannot be read.
    """
    parser = jsonargparse.ArgumentParser(prog=prog, exit_on_error=False, allow_abbrev=False,
                                         description="GRPO post-training of a language model, one SPMD program.")
    parser.add_argument("--config", action="config", help="YAML file; later options win over it")
    parser.add_argument("--profile", type=str, metavar="STEPS", help="short for --run.profile_steps")
    parser.add_argument("--dry_run", type=bool, nargs="?", const=True, default=False,
                        help="check everything that needs no weights, print the batch arithmetic, exit")
    parser.add_argument("--record_rollouts", type=bool, nargs="?", const=True, help="short for --run.record_rollouts")
    parser.add_argument("--replay", type=str, help="short for --run.replay")
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
    if namespace.profile is not None:
        sections["run"].profile_steps = namespace.profile
    for name in ("record_rollouts", "replay"):
        if namespace[name] is not None:
            setattr(sections["run"], name, namespace[name])
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
