"""For the same tokens, log-probs and advantages each loss is TRL's, value and gradient, where the definitions agree."""

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from spmd_rl.batch import StepTotals
from spmd_rl.config import LossConfig
from spmd_rl.losses import LossInputs, policy_loss, quantile, sampler_weights

grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="needs trl, of the extra 'test'")

LENGTHS = [1, 3, 2, 6]
MAX_LENGTH = 8
TOLERANCE = 1e-7  # TRL has sapo's temperature 1.05 in fp32; all others agree to 1e-9


def draw():
    """Log-probs of four ragged completions in float64: policy, old, sampler, reference, entropies; and advantages."""
    generator = torch.Generator().manual_seed(3)
    total = sum(LENGTHS)
    old = -torch.rand(total, generator=generator, dtype=torch.float64) * 3
    noise = [torch.randn(total, generator=generator, dtype=torch.float64) for _ in range(3)]
    return SimpleNamespace(policy=old + 0.3 * noise[0], old=old, sampler=old + 0.2 * noise[1], ref=old + 0.5 * noise[2],
                           entropy=torch.rand(total, generator=generator, dtype=torch.float64),
                           advantages=torch.tensor([1.0, -1.0, 2.0, -2.0], dtype=torch.float64))


def padded(values):
    """(4, 6) rows of ragged values."""
    return torch.nn.utils.rnn.pad_sequence(list(values.split(LENGTHS)), batch_first=True)


def trl_loss(data, config):
    """TRL's loss on the padded batch: its trainer's own method, on one process, outside of accumulation."""
    mask = padded(torch.ones(sum(LENGTHS), dtype=torch.float64))
    logprobs = padded(data.policy).requires_grad_()
    ratio = padded(sampler_weights(inputs_of(data), config))
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logprobs, padded(data.entropy), None),
        get_high_entropy_mask=lambda *args: grpo_trainer.GRPOTrainer.get_high_entropy_mask(trainer, *args),
        aux_loss_enabled=False, top_entropy_quantile=config.top_entropy_quantile, off_policy_mask_threshold=None,
        importance_sampling_level=config.importance_sampling_level, beta=config.beta, loss_type=config.loss_type,
        epsilon_low=config.epsilon, epsilon_high=config.epsilon if config.epsilon_high is None else config.epsilon_high,
        args=SimpleNamespace(use_bias_correction_kl=config.use_bias_correction_kl, delta=config.delta,
                             sapo_temperature_pos=config.sapo_temperature_pos,
                             sapo_temperature_neg=config.sapo_temperature_neg, steps_per_generation=1),
        use_vllm=True, vllm_importance_sampling_correction=config.importance_sampling_correction,
        model=SimpleNamespace(training=False), max_completion_length=MAX_LENGTH, current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x,
                                    pad_across_processes=lambda x, dim, pad_index: x),
        _entropy_bonus_enabled=config.entropy_coef != 0, entropy_coef=config.entropy_coef, use_adaptive_entropy=False,
        _metrics={"eval": defaultdict(list)})
    ids = torch.zeros(4, 6, dtype=torch.long)
    inputs = dict(prompt_ids=ids, prompt_mask=ids, completion_ids=ids, completion_mask=mask,
                  advantages=data.advantages, old_per_token_logps=padded(data.old),
                  ref_per_token_logps=padded(data.ref), importance_sampling_ratio=ratio, num_items_in_batch=mask.sum())
    loss = grpo_trainer.GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.item(), logprobs.grad[mask.bool()]


def inputs_of(data):
    sequence_N = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
    return LossInputs(data.policy.clone().requires_grad_(), data.old, data.sampler, data.advantages[sequence_N],
                      sequence_N, torch.tensor(LENGTHS, dtype=torch.float64)[sequence_N], data.entropy, data.entropy,
                      data.ref)


FIELDS = [
    {}, {"epsilon_high": 0.28}, {"delta": 1.5}, {"beta": 0.1}, {"beta": 0.1, "use_bias_correction_kl": False},
    {"importance_sampling_correction": False}, {"importance_sampling_mode": "token_truncate"},
    {"importance_sampling_mode": "token_mask", "importance_sampling_clip_min": 0.8},
    {"importance_sampling_mode": "sequence_truncate", "importance_sampling_clip_max": 1.1}, {"entropy_coef": 0.01},
]
# Neither cispo nor sapo has a clip for delta to bound.
ROWS = [(loss_type, fields) for loss_type in ("dapo", "grpo", "dr_grpo", "cispo", "sapo") for fields in FIELDS
        if loss_type not in ("cispo", "sapo") or "delta" not in fields]


@pytest.mark.parametrize("loss_type, fields", ROWS, ids=str)
def test_equal_to_trl(loss_type, fields):
    """Same value and same gradient of every token's log-prob."""
    fields = fields | ({"epsilon_high": 1.3} if loss_type == "cispo" else {})
    config, data = LossConfig(loss_type=loss_type, **fields), draw()
    inputs = inputs_of(data)
    found = policy_loss(inputs, config, StepTotals(sum(LENGTHS), 4), MAX_LENGTH)
    found.backward()
    value, gradient = trl_loss(data, config)
    assert math.isclose(found.item(), value, abs_tol=TOLERANCE)
    assert (inputs.logprobs_N.grad - gradient).abs().max() < TOLERANCE


def test_case_01_value_by_trl():
    """Its dapo on the case's numbers, at ratio 1: 10 / 12, as ours in every split."""
    data = draw()
    data.policy = data.sampler = data.old
    value, gradient = trl_loss(data, LossConfig())
    assert math.isclose(value, 10 / 12, abs_tol=TOLERANCE)
    expected = -data.advantages[inputs_of(data).sequence_N] / 12
    assert (gradient - expected).abs().max() < TOLERANCE


def test_equal_to_trl_top_entropy():
    """The token loss over the 30 % of tokens with the highest entropy, normalised by all."""
    config, data = LossConfig(top_entropy_quantile=0.3), draw()
    inputs = inputs_of(data)
    threshold = quantile(data.entropy.tolist(), 0.7)
    found = policy_loss(inputs, config, StepTotals(sum(LENGTHS), 4), MAX_LENGTH, entropy_threshold=threshold)
    found.backward()
    value, gradient = trl_loss(data, config)
    assert math.isclose(found.item(), value, abs_tol=TOLERANCE)
    assert (inputs.logprobs_N.grad - gradient).abs().max() < TOLERANCE
    assert 0 < (gradient == 0).sum() < sum(LENGTHS)


def test_equal_to_trl_gspo():
    """Sequence-level ratios, with grpo's mean of completions, as TRL recommends for GSPO."""
    config, data = LossConfig(loss_type="grpo", importance_sampling_level="sequence"), draw()
    inputs = inputs_of(data)
    found = policy_loss(inputs, config, StepTotals(sum(LENGTHS), 4), MAX_LENGTH)
    found.backward()
    value, gradient = trl_loss(data, config)
    assert math.isclose(found.item(), value, abs_tol=TOLERANCE)
    assert (inputs.logprobs_N.grad - gradient).abs().max() < TOLERANCE
