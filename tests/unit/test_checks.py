"""What cannot run is refused before anything is loaded, with field, value and fix."""

import pytest

from spmd_rl.checks import (DEEPSPEED_OWNED, REFUSED_RAW, VLLM_OWNED, check_cpu_engine, check_second_shards,
                            sampler_differences, validate, validate_saved)
from spmd_rl.config import Config, ConfigError

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@pytest.fixture
def good(tmp_path, monkeypatch):
    """A config that validates on 4 ranks; a test then spoils one thing."""
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    config = Config()
    config.model.path = "model"
    config.data.train = str(tmp_path / "train.jsonl")
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n')
    config.run.output_dir = str(tmp_path / "run")
    return config


def set_field(config, name, value):
    section, _, field = name.partition(".")
    setattr(getattr(config, section), field, value)


def nested(path, value):
    """{"a": {"b": value}} of "a.b"."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def test_a_good_config_is_taken(good):
    """The config that the tests below spoil is itself good, on 1, 2 and 4 ranks."""
    for world_size in (1, 2, 4):
        validate(good, world_size)


def test_several_greedy_completions_are_refused(good):
    """They are all the same: pass@k of them would be pass@1."""
    good.evaluate.num_generations = 4
    with pytest.raises(ConfigError, match="evaluate.temperature is 0.0.*evaluate.num_generations"):
        validate(good, 1)
    good.evaluate.temperature = 0.7
    validate(good, 1)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("name, value", [
    ("model.path", ""), ("data.train", ""), ("run.max_steps", 0), ("run.max_steps", -1), ("run.seed", -1),
    ("mesh.timeout_s", 0.0), ("data.max_prompt_length", 0), ("rollout.num_generations", 0),
    ("rollout.num_generations", 1), ("rollout.max_completion_length", 0), ("rollout.temperature", -0.5),
    ("rollout.temperature", NAN), ("rollout.temperature", INF), ("rollout.top_p", 0.0), ("rollout.top_p", 1.1),
    ("rollout.min_p", -0.1), ("rollout.top_k", -1), ("rollout.min_tokens", 257),
    ("rollout.gpu_memory_utilization", 0.0), ("rollout.gpu_memory_utilization", 1.0),
    ("rollout.repetition_penalty", 0.0), ("rollout.tensor_parallel_size", 0),
    ("batch.prompts_per_step", 0), ("batch.max_tokens_per_microbatch", 0), ("loss.epsilon", -0.1),
    ("loss.epsilon", 1.0), ("loss.epsilon_high", -0.1), ("loss.beta", -0.1), ("loss.beta", NAN),
    ("loss.loss_type", "ppo"), ("rewards.functions", []), ("rewards.weights", [1.0, 2.0]), ("rewards.weights", []),
    ("policy.learning_rate", -1e-6), ("policy.learning_rate", NAN), ("policy.learning_rate", INF),
    ("policy.max_grad_norm", -1.0), ("policy.logprob_memory_gib", 0.0), ("weight_sync.bucket_mib", 0),
    ("checkpoint.export_steps", -1), ("checkpoint.max_shard_gib", 0.0), ("evaluate.eval_steps", 5),
    ("policy.gradient_checkpointing_every", 0), ("metrics.peak_tflops", -1.0),
    ("data.train", "no/such/file.jsonl"), ("data.eval", "no/such/file.jsonl"), ("data.train", []),
    ("data.train", ["a/b", "a/b"]), ("data.weights", [0.5, 0.5]), ("data.weights", [0.0]), ("data.weights", [NAN]),
    ("data.chat_template_kwargs", {"tokenize": True}), ("rewards.weights", [NAN]), ("rewards.num_workers", -1),
    ("rewards.timeout_s", 0.0), ("rewards.memory_gib", -1.0), ("rewards.failed_reward", NAN),
    ("evaluate.num_generations", 0), ("evaluate.temperature", -1.0),
    ("evaluate.max_completion_length", 0), ("evaluate.max_completion_length", 10**6),
    ("metrics.completions_steps", -1), ("metrics.num_completions", 0), ("run.profile_steps", "x")])
def test_a_number_out_of_range_is_refused_by_name(good, name, value):
    """A value that cannot run is refused with the field and the value, before anything is loaded."""
    set_field(good, name, value)
    with pytest.raises(ConfigError) as error:
        validate(good, 4)
    assert name in str(error.value) and repr(value) in str(error.value)


@pytest.mark.parametrize("temperature", [0.0, -0.0])
def test_case_75_temperature_zero_is_refused(good, temperature):
    """Training at T = 0 has no distribution to take log-probs of."""
    good.rollout.temperature = temperature
    with pytest.raises(ConfigError, match="rollout.temperature.*above 0"):
        validate(good, 1)


@pytest.mark.parametrize("buffer, is_good", [(0, False), (1, True), (255, True), (256, False), (300, False)])
def test_an_overlong_buffer_lies_within_the_completion(good, buffer, is_good):
    """soft_overlong needs a buffer above 0 and below the limit of 256; without that reward it is not looked at."""
    good.rewards.overlong_buffer = buffer
    validate(good, 1)
    good.rewards.functions = ["soft_overlong"]
    if is_good:
        validate(good, 1)
        return
    with pytest.raises(ConfigError, match=f"rewards.overlong_buffer is {buffer}: .*256"):
        validate(good, 1)


@pytest.mark.parametrize("name, value, message", [
    ("loss_type", "bnpo", "set dapo"), ("loss_type", "luspo", "set dapo, grpo, dr_grpo, cispo, sapo, or your own"),
    ("loss_type", "cispo", "loss.epsilon_high is None: for cispo"), ("delta", 1.2, "above 1 \\+ epsilon_high, 1.2"),
    ("dual_clip", 1.0, "above 1"), ("top_entropy_quantile", 0.0, "above 0 and at most 1"),
    ("top_entropy_quantile", 1.1, "above 0 and at most 1"), ("ref_model_sync_steps", 5, "no reference with beta 0"),
    ("ref_model_mixup_alpha", 0.0, "above 0 and at most 1"), ("importance_sampling_clip_min", 4.0, "at most .*3.0"),
    ("importance_sampling_clip_max", 0.0, "above 0, or null"), ("num_iterations", 0, "above 0"),
    ("entropy_coef", -0.1, "0 or more"), ("sapo_temperature_pos", 0.0, "above 0")])
def test_a_loss_that_cannot_be_meant_is_refused(good, name, value, message):
    """Each contradiction names its field and the way out."""
    set_field(good, f"loss.{name}", value)
    with pytest.raises(ConfigError, match=message):
        validate(good, 1)


@pytest.mark.parametrize("estimator, corrected, refused", [
    ("k1", True, None), ("k1", False, "loss.kl_estimator is 'k1': .*0 in the mean.*kl_in reward"),
    ("k2", True, "loss.use_bias_correction_kl is True: .*no KL's: set it to false"), ("k2", False, None),
    ("k3", True, None), ("k3", False, None)])
def test_a_kl_whose_gradient_is_none_is_refused(good, estimator, corrected, refused):
    """In the loss; taken off a reward each is an estimate, and with beta 0 there is none."""
    good.loss.kl_estimator, good.loss.use_bias_correction_kl = estimator, corrected
    validate(good, 1)
    good.loss.beta, good.loss.kl_in = 0.1, "reward"
    validate(good, 1)
    good.loss.kl_in = "loss"
    if refused is None:
        validate(good, 1)
        return
    with pytest.raises(ConfigError, match=refused):
        validate(good, 1)


@pytest.mark.parametrize("name", ["delta", "dual_clip"])
@pytest.mark.parametrize("loss_type, is_good", [("dapo", True), ("grpo", True), ("dr_grpo", True), ("cispo", False),
                                                ("sapo", False), ("my:loss", True)])
def test_a_bound_needs_a_clip(good, loss_type, is_good, name):
    """delta and dual_clip with a loss that has no clip would do nothing in silence."""
    good.loss.loss_type, good.loss.epsilon_high = loss_type, 5.0
    set_field(good, f"loss.{name}", 8.0)
    if is_good:
        validate(good, 1)
        return
    with pytest.raises(ConfigError, match=f"loss.{name} is 8.0: {loss_type} has no clip"):
        validate(good, 1)


@pytest.mark.parametrize("name, value, is_penalty", [
    ("top_p", 0.9, False), ("top_k", 50, False), ("min_p", 0.05, False), ("min_tokens", 3, False),
    ("repetition_penalty", 1.1, True), ("repetition_penalty", 0.9, True), ("presence_penalty", 0.5, True),
    ("presence_penalty", -0.5, True), ("frequency_penalty", 0.5, True)])
def test_options_that_make_sampler_and_policy_differ_are_named(good, name, value, is_penalty):
    """Each is named with its value; without the correction a penalty is refused, a cut of the tail is not."""
    assert sampler_differences(good) == []
    set_field(good, f"rollout.{name}", value)
    assert sampler_differences(good) == [f"rollout.{name} {value:g}"]
    validate(good, 1)
    good.loss.importance_sampling_correction = False
    if not is_penalty:
        validate(good, 1)
        return
    with pytest.raises(ConfigError, match="loss.importance_sampling_correction is False.*penalties"):
        validate(good, 1)


def test_a_replay_needs_no_data_and_records_nothing(good):
    """Its completions are recorded ones: no prompts are read, and none are sampled."""
    good.data.train, good.data.eval, good.run.replay = "", "no/such/file.jsonl", "rollouts"
    validate(good, 4)
    good.run.record_rollouts = True
    with pytest.raises(ConfigError, match="run.record_rollouts is True"):
        validate(good, 4)


def test_a_regex_reward_needs_its_pattern(good):
    """A reward without what it needs is refused by the field that is missing."""
    good.rewards.functions = ["regex"]
    with pytest.raises(ConfigError, match="rewards.regex_pattern"):
        validate(good, 1)


def test_a_group_of_one_is_taken_where_nothing_is_divided(good):
    """One completion a prompt has no deviation: refused with scaling only."""
    good.rollout.num_generations = 1
    good.advantages.scale_rewards = "none"
    validate(good, 1)


@pytest.mark.parametrize("tp, world_size, fits", [(3, 4, [1, 2, 4]), (2, 1, [1]), (4, 6, [1, 2, 3, 6]),
                                                  (8, 4, [1, 2, 4])])
def test_tensor_parallel_size_must_divide_the_ranks(good, tp, world_size, fits):
    """The error lists the sizes that fit."""
    good.rollout.tensor_parallel_size = tp
    with pytest.raises(ConfigError, match="rollout.tensor_parallel_size") as error:
        validate(good, world_size)
    assert str(tp) in str(error.value) and str(fits) in str(error.value)


@pytest.mark.parametrize("prompts, tp, world_size, fix", [(10, 1, 4, "set 8 or 12"), (3, 1, 4, "set 4"),
                                                          (5, 2, 4, "set 4 or 6"), (7, 1, 2, "set 6 or 8")])
def test_prompts_must_divide_over_the_engines(good, prompts, tp, world_size, fix):
    """The error names the two nearest numbers that fit."""
    good.batch.prompts_per_step, good.rollout.tensor_parallel_size = prompts, tp
    with pytest.raises(ConfigError, match=f"batch.prompts_per_step is {prompts}.*{fix}$"):
        validate(good, world_size)


OWNED = [("deepspeed", k, v) for k, v in DEEPSPEED_OWNED.items()] + [("vllm", k, v) for k, v in VLLM_OWNED.items()]


@pytest.mark.parametrize("value", [1, 0, True, False, "x", {"enabled": True}, {}])
@pytest.mark.parametrize("section, option, owner", OWNED)
def test_a_raw_option_that_a_field_owns_is_refused(good, section, option, owner, value):
    """A raw option may not say what a field of ours says: with both, one of them would be ignored in silence."""
    setattr(good, section, nested(option, value))
    with pytest.raises(ConfigError) as error:
        validate(good, 1)
    assert f"{section}.{option}" in str(error.value) and owner in str(error.value)


@pytest.mark.parametrize("section, raw", [
    ("deepspeed", {"zero_optimization": {"overlap_comm": False, "stage3_max_live_parameters": 7}}),
    ("deepspeed", {"wall_clock_breakdown": True}), ("vllm", {"max_num_seqs": 64, "compilation_config": {"level": 3}}),
    ("vllm", {"enable_lora": False}), ("vllm", {"data_parallel_size": 1}), ("vllm", {"quantization": None}),
    ("deepspeed", {"sequence_parallel_size": 1})])
def test_other_raw_options_pass(good, section, raw):
    """What no field owns goes through, and so does a refused option that asks for nothing."""
    setattr(good, section, raw)
    validate(good, 1)


ASKED = {"vllm.enable_lora": [True], "vllm.data_parallel_size": [2], "vllm.pipeline_parallel_size": [2],
         "vllm.enable_expert_parallel": [True], "vllm.quantization": ["fp8", "awq"],
         "vllm.weight_transfer_config": [{"backend": "ipc"}], "deepspeed.sequence_parallel_size": [2],
         "deepspeed.tensor_parallel": [{"autotp_size": 2}, {"enabled": True}]}


@pytest.mark.parametrize("option, value", [(option, value) for option in REFUSED_RAW for value in ASKED[option]])
def test_what_is_not_supported_is_refused_by_name(good, option, value):
    """Decision 11: the error says what it is. True equals 1 in Python, but asks for something where 1 does not."""
    section, _, key = option.partition(".")
    setattr(good, section, {key: value})
    with pytest.raises(ConfigError) as error:
        validate(good, 1)
    assert option in str(error.value) and REFUSED_RAW[option] in str(error.value)


@pytest.mark.parametrize("what", ["offload_optimizer", "offload_param"])
def test_states_on_disk_are_refused(good, what):
    """A checkpoint would have to read what DeepSpeed has moved there; host memory is fine."""
    good.deepspeed = {"zero_optimization": {what: {"device": "cpu"}}}
    validate(good, 1)
    good.deepspeed["zero_optimization"][what]["device"] = "nvme"
    with pytest.raises(ConfigError, match=f"deepspeed.zero_optimization.{what}.device is 'nvme': checkpoints"):
        validate(good, 1)


@pytest.mark.parametrize("group, stage, message", [
    (2, 3, None), (4, 3, None), (1, 2, None), (1, 3, None), (3, 3, "must divide the number of ranks, 4"),
    (8, 3, "must divide the number of ranks, 4"), (2, 2, "sharded at policy.zero_stage 3 only"),
    *((value, 3, "must divide") for value in (True, "2", -2, 0, 2.0, None, "", [], {}))])
def test_second_shards_are_of_groups_of_ranks(good, group, stage, message):
    """ZeRO++'s hpZ: DeepSpeed would fail in an assertion once the model is being loaded, or do nothing."""
    good.policy.zero_stage = stage
    good.deepspeed = {"zero_optimization": {"zero_hpz_partition_size": group}}
    validate_saved(good, 4)  # an evaluation shards no model
    for check in (validate, check_second_shards):
        if message is None:
            check(good, 4)
            continue
        with pytest.raises(ConfigError, match=f"deepspeed.zero_optimization.zero_hpz_partition_size is .*{message}"):
            check(good, 4)


@pytest.mark.parametrize("option, value", [
    ("enable_chunked_prefill", True), ("long_prefill_token_threshold", 64), ("max_num_batched_tokens", 100),
    ("max_num_batched_tokens", None)])
def test_a_cpu_engine_reads_prompts_whole(good, option, value):
    """vLLM fails in the middle of a rollout else, or while it starts."""
    good.data.max_prompt_length, good.rollout.max_completion_length = 100, 28
    good.vllm = {"max_num_batched_tokens": 128, "enable_chunked_prefill": False}
    check_cpu_engine(good)
    good.vllm[option] = value
    with pytest.raises(ConfigError, match=f"vllm.{option} is {value}: on a CPU the engine has to read prompts whole"):
        check_cpu_engine(good)


@pytest.mark.parametrize("option", ["mics_shard_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights"])
def test_weights_that_are_others_are_refused(good, option):
    """Sharded within groups only, or quantised: the sampler, the reference or a checkpoint would have others."""
    good.policy.zero_stage = 3
    good.deepspeed = {"zero_optimization": {option: 2}}
    with pytest.raises(ConfigError, match=f"deepspeed.zero_optimization.{option} is 2: .*; remove it"):
        validate(good, 4)


def test_gradients_dealt_out_in_turns_are_refused(good):
    """With 2 ranks an export of such a checkpoint had other weights than the policy; false asks for nothing."""
    good.deepspeed = {"zero_optimization": {"round_robin_gradients": False}}
    validate(good, 2)
    good.deepspeed["zero_optimization"]["round_robin_gradients"] = True
    with pytest.raises(ConfigError, match="deepspeed.zero_optimization.round_robin_gradients is True: DeepSpeed's own"):
        validate(good, 2)


@pytest.mark.parametrize("text", [
    "expandable_segments:True", "expandable_segments:true", " expandable_segments : True ",
    "max_split_size_mb:128,expandable_segments:True", "expandable_segments:True,max_split_size_mb:128",
    "roundup_power2_divisions:[256:1,512:2],expandable_segments:True,garbage_collection_threshold:0.8"])
@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
def test_expandable_segments_are_refused_in_each_variable(good, monkeypatch, name, text):
    """The option breaks memory handles and the sleep pool under either name, wherever in the string it stands."""
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=f"{name} is .*expandable_segments"):
        validate(good, 1)


@pytest.mark.parametrize("text", ["", "expandable_segments:False", "max_split_size_mb:128",
                                  "max_split_size_mb:128,expandable_segments:False"])
@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
def test_other_allocator_options_stay(good, monkeypatch, name, text):
    """Other options are no business of ours."""
    monkeypatch.setenv(name, text)
    validate(good, 1)


def test_expandable_segments_in_both_variables_at_once(good, monkeypatch):
    """The one that is off does not hide the one that is on."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ConfigError, match="PYTORCH_CUDA_ALLOC_CONF"):
        validate(good, 1)


def test_an_output_folder_that_is_a_file_is_refused(good, tmp_path):
    """Found at the start, not at the first write."""
    good.run.output_dir = good.data.train
    with pytest.raises(ConfigError, match="run.output_dir"):
        validate(good, 1)
