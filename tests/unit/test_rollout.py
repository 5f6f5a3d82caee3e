"""Request seeds and the engine's arguments; no engine is started."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from spmd_rl.batch import Prompt
from spmd_rl.config import Config, MeshConfig
from spmd_rl.load_plan import Weight
from spmd_rl.mesh import Mesh
from spmd_rl.rollout import (STEP_EVALUATION, EngineState, Rollout, Sampling, before_stop, engine_arguments,
                             hf_names, request_seed)


def test_every_request_has_its_own_seed():
    """No two of (run seed, step, prompt, sample) share a seed, evaluation included; seeds fit a signed 64-bit number.

    Joining the numbers without a mark between them makes (1, 11) and (11, 1) one.
    """
    places = list(itertools.product((0, 1, 11, 111), (STEP_EVALUATION, 0, 1, 11, 111), (0, 1, 11, 111), (0, 1, 11)))
    seeds = [request_seed(*place) for place in places]
    assert len(set(seeds)) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [request_seed(*place) for place in places]


def test_engine_arguments_follow_the_config(mesh: Mesh):
    """The engine's type and lengths are the policy's, its log-probs those of what was sampled from; raw ones come last.
    """
    config = Config(mesh=MeshConfig(device="cpu"), vllm={"max_num_seqs": 4})
    config.data.max_prompt_length, config.rollout.max_completion_length = 100, 28
    found = engine_arguments(config, mesh, sleeps=False)
    assert found["max_model_len"] == 128 and found["dtype"] == config.model.dtype
    assert found["logprobs_mode"] == "processed_logprobs" and found["generation_config"] == "vllm"
    assert found["load_format"] == "dummy" and found["distributed_executor_backend"] == "external_launcher"
    assert found["max_num_seqs"] == 4 and found["enable_sleep_mode"] is False
    assert found["enable_chunked_prefill"] is False


@pytest.mark.parametrize("kv_cache_gib, share", [(0.0, 0.9), (4.0, 0.05)])
def test_the_engines_share_counts_what_it_adds(kv_cache_gib, share):
    """As the user gave it, also on weights of the policy's; with a cache of a fixed size it is only what has to be free
    at the start."""
    weights = [Weight("w", (5, 10), torch.bfloat16, [])]
    config = Config()
    config.rollout.gpu_memory_utilization, config.rollout.kv_cache_gib = 0.9, kv_cache_gib
    on_gpu = SimpleNamespace(device=torch.device("cuda", 0))
    found = engine_arguments(config, on_gpu, True, weights)
    assert found["gpu_memory_utilization"] == pytest.approx(share) and found["load_format"] == "spmd_rl"
    assert engine_arguments(config, on_gpu, True)["load_format"] == "dummy"
    assert "enable_chunked_prefill" not in found


@pytest.mark.parametrize("is_reset", [True, False])
def test_a_prefix_cache_of_older_weights_is_never_sampled_from(is_reset):
    """vLLM only warns, and returns False, where a request still holds blocks."""
    rollout = Rollout.__new__(Rollout)
    rollout._frees, rollout.state = False, EngineState.WEIGHTS_LOADED
    rollout._llm = SimpleNamespace(reset_prefix_cache=lambda: is_reset)
    if is_reset:
        rollout.wake_kv_cache()
    else:
        with pytest.raises(RuntimeError, match="did not reset its prefix cache"):
            rollout.wake_kv_cache()
    assert rollout.is_ready is is_reset


@pytest.mark.parametrize("text, stops, right", [
    ("12;34", [";"], "12"), ("12;34", ["4", ";"], "12"), ("12", [";"], "12"), ("", [";"], ""), (";1", [";"], ""),
    ("12ab", [], "12ab")])
def test_text_ends_before_the_first_stop_text(text, stops, right):
    """The reward sees the text up to the stop, whichever comes first, and all of it where there is none."""
    assert before_stop(text, stops) == right


class _Model:
    """What an engine's model shows of itself."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}

    def __init__(self, tied):
        self.config = type("Config", (), {"tie_word_embeddings": tied})

    def named_parameters(self):
        names = ["model.embed_tokens.weight", "model.layers.0.self_attn.qkv_proj.bias",
                 "model.layers.0.mlp.gate_up_proj.weight", "model.norm.weight", "lm_head.weight"]
        return [(name, None) for name in names]


@pytest.mark.parametrize("tied", [True, False])
def test_the_engines_fused_tensors_are_taken_apart(tied):
    """Names as the checkpoint has them; a tied head is no tensor of its own."""
    layer = "model.layers.0"
    wanted = {"model.embed_tokens.weight", *(f"{layer}.self_attn.{n}_proj.bias" for n in "qkv"),
              f"{layer}.mlp.gate_proj.weight", f"{layer}.mlp.up_proj.weight", "model.norm.weight"}
    assert hf_names(_Model(tied)) == (wanted if tied else wanted | {"lm_head.weight"})


class _Engine:
    """As much of vLLM as `generate` uses: requests end one a step, the last first, and come back in order."""

    def __init__(self):
        self.request_counter = itertools.count(7)
        self.llm_engine = self
        self.events = []

    def step(self):
        request_id, prompt = self.waiting.pop()
        self.events.append(f"step {request_id}")
        logprobs = SimpleNamespace(logprobs=[-1.0], start_indices=[0])
        best = SimpleNamespace(logprobs=logprobs, token_ids=[65], finish_reason="stop")
        output = SimpleNamespace(request_id=str(request_id), finished=True, outputs=[best],
                                 prompt_token_ids=prompt["prompt_token_ids"])
        return [SimpleNamespace(finished=False), output]

    def generate(self, prompts, parameters, use_tqdm):
        self.waiting = [(next(self.request_counter), prompt) for prompt in prompts]
        while self.waiting:
            self.step()
        return None


def test_completions_are_handed_out_as_they_end(tokenizer):
    """In the order in which the engine ends them, between its steps; the result is in the order of the prompts, and
    a second call counts from where the first ended."""
    rollout = Rollout.__new__(Rollout)
    rollout._config, rollout._tokenizer, rollout._llm = Config(), tokenizer, _Engine()
    rollout._vllm = SimpleNamespace(SamplingParams=dict)
    rollout.state, rollout.version = EngineState.READY, 3
    prompts = [Prompt(0, "a", [1], {}), Prompt(1, "b", [2, 2], {})]
    for first_id in (8, 13):
        events = rollout._llm.events
        events.clear()
        found = rollout.generate(prompts, 10, 0, Sampling(2, 5), lambda place, c: events.append((place, c.group,
                                                                                                c.sample, c.text)))
        text = tokenizer.decode([65])
        assert events == [event for place in (3, 2, 1, 0)
                          for event in (f"step {first_id + place}", (place, 10 + place // 2, place % 2, text))]
        assert [(c.group, c.sample, c.prompt_ids) for c in found] == [
            (10, 0, [1]), (10, 1, [1]), (11, 0, [2, 2]), (11, 1, [2, 2])]
    assert rollout.generate([], 0, 0, Sampling(2, 5)) == []
