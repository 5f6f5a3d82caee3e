"""What a run says of its sampler after the first step."""

import pytest

from spmd_rl.config import Config
from spmd_rl.train import sampler_warning

METRICS = {"sampling/kl": 0.0251, "sampling/importance_sampling_ratio/mean": 0.941,
           "sampling/sampling_logp_difference/mean": 0.0623, "sampling/importance_sampling_weight/mean": 0.5,
           "sampling/masked_fraction": 0.125}


def test_the_warning_has_the_numbers():
    """Options with their values, what was measured, and what the correction makes of it."""
    config = Config()
    config.rollout.top_p, config.rollout.repetition_penalty = 0.9, 1.1
    text = sampler_warning(config, METRICS)
    for words in ("rollout.top_p 0.9, rollout.repetition_penalty 1.1", "0.941 a token", "gap| 0.0623", "KL 0.0251",
                  "sequence_mask weighs a token's loss by 0.5", "12.5 % of the tokens out"):
        assert words in text
    config.loss.importance_sampling_correction = False
    assert sampler_warning(config, METRICS).endswith("nothing corrects it (loss.importance_sampling_correction is "
                                                     "false)")


@pytest.mark.parametrize("top_p, metrics", [(1.0, METRICS), (0.9, {"reward": 0.0})])
def test_no_warning_without_a_difference_or_without_numbers(top_p, metrics):
    """Numerics alone are no reason for one; a step that trained no token has measured nothing."""
    config = Config()
    config.rollout.top_p = top_p
    assert sampler_warning(config, metrics) is None
