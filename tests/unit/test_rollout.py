"""Request seeds and the engine's arguments; no engine is started."""

import itertools

import pytest

from spmd_rl.config import Config, MeshConfig
from spmd_rl.mesh import Mesh
from spmd_rl.rollout import STEP_EVALUATION, before_stop, engine_arguments, hf_names, request_seed


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
    found = engine_arguments(config, mesh)
    assert found["max_model_len"] == 128 and found["dtype"] == config.model.dtype
    assert found["logprobs_mode"] == "processed_logprobs" and found["generation_config"] == "vllm"
    assert found["load_format"] == "dummy" and found["distributed_executor_backend"] == "external_launcher"
    assert found["max_num_seqs"] == 4 and found["enable_sleep_mode"] is False


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
