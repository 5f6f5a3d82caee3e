"""Request seeds and the engine's arguments; no engine is started."""

import itertools

from spmd_rl.config import Config, MeshConfig
from spmd_rl.mesh import Mesh
from spmd_rl.rollout import STEP_EVALUATION, engine_arguments, request_seed


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
