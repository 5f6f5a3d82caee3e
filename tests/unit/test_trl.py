"""For the same tokens, rewards and log-probs each loss is TRL's, value and gradient, where the definitions agree."""

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from spmd_rl.advantages import group_advantages, normalize_then_sum
from spmd_rl.batch import StepTotals
from spmd_rl.config import AdvantagesConfig, LossConfig
from spmd_rl.losses import LossInputs, policy_loss, quantile

grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="needs trl, of the extra 'test'")
Trainer = grpo_trainer.GRPOTrainer

LENGTHS = [1, 3, 2, 6]
SEQUENCE_N = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
GROUPS = [0, 0, 1, 1]
REWARDS = [[2.0], [0.0], [4.0], [1.0]]  # of each completion by each reward function
WEIGHTS = [1.0, 0.5]
MAX_LENGTH = 8
EOS = 7
TOLERANCE = 1e-9


@pytest.fixture(autouse=True)
def float64():
    """TRL makes some tensors of Python's numbers in torch's default type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def draw():
    """Log-probs of four ragged completions: policy, old, sampler, reference; and entropies."""
    generator = torch.Generator().manual_seed(3)
    total = sum(LENGTHS)
    old = -torch.rand(total, generator=generator) * 3
    noise = [torch.randn(total, generator=generator) for _ in range(3)]
    return SimpleNamespace(policy=old + 0.3 * noise[0], old=old, sampler=old + 0.2 * noise[1], ref=old + 0.5 * noise[2],
                           entropy=torch.rand(total, generator=generator))


def padded(values):
    """(4, 6) rows of ragged values."""
    return torch.nn.utils.rnn.pad_sequence(list(values.split(LENGTHS)), batch_first=True)


def trl(data, config, advantages, rewards, truncated=()):
    """TRL's advantages, loss and gradient on the padded batch: its trainer's own methods, on one process, outside of
    accumulation. truncated: completions that did not end by themselves."""
    policy, reference = (SimpleNamespace(training=False, is_gradient_checkpointing=False) for _ in range(2))
    logprobs = {id(policy): padded(data.old), id(reference): padded(data.ref)}
    token_ids = [[9] * (n - 1) + [9 if i in truncated else EOS] for i, n in enumerate(LENGTHS)]
    sampler_logprobs = [part.tolist() for part in data.sampler.split(LENGTHS)]
    found = torch.tensor(rewards)
    trainer = SimpleNamespace(
        # What a rollout is: one token of prompt, the completions, the engine's log-probs.
        _generate=lambda prompts: ([[1]] * 4, token_ids, None, [""] * 4, sampler_logprobs, {}, None, None),
        _calculate_rewards=lambda *args: found, reward_funcs=rewards[0], reward_func_names="ab"[:found.shape[1]],
        reward_weights=torch.tensor(WEIGHTS[:found.shape[1]]), num_generations=2, num_generations_eval=2,
        scale_rewards=advantages.scale_rewards, multi_objective_aggregation=advantages.multi_objective_aggregation,
        mask_truncated_completions=config.mask_truncated_completions, eos_token_ids=[EOS],
        _get_per_token_logps_and_entropies=lambda model, *args, **_: (logprobs[id(model)], padded(data.entropy), None),
        get_high_entropy_mask=lambda *args: Trainer.get_high_entropy_mask(trainer, *args),
        # Its settings, by ours.
        loss_type=config.loss_type, importance_sampling_level=config.importance_sampling_level, beta=config.beta,
        epsilon_low=config.epsilon, epsilon_high=config.epsilon if config.epsilon_high is None else config.epsilon_high,
        top_entropy_quantile=config.top_entropy_quantile, max_completion_length=MAX_LENGTH, num_iterations=1,
        use_vllm=True, vllm_importance_sampling_correction=config.importance_sampling_correction,
        vllm_importance_sampling_mode=config.importance_sampling_mode,
        vllm_importance_sampling_clip_min=config.importance_sampling_clip_min,
        vllm_importance_sampling_clip_max=config.importance_sampling_clip_max,
        entropy_coef=config.entropy_coef, _entropy_bonus_enabled=config.entropy_coef != 0, use_adaptive_entropy=False,
        args=SimpleNamespace(use_bias_correction_kl=config.use_bias_correction_kl, delta=config.delta,
                             sapo_temperature_pos=config.sapo_temperature_pos,
                             sapo_temperature_neg=config.sapo_temperature_neg, steps_per_generation=1,
                             gradient_accumulation_steps=1, per_device_eval_batch_size=4,
                             gradient_checkpointing_kwargs=None),
        # What is not used here.
        model=policy, ref_model=reference, accelerator=SimpleNamespace(
            num_processes=1, process_index=0, device=torch.device("cpu"), gather=lambda x: x,
            reduce=lambda x, reduction: x, pad_across_processes=lambda x, dim, pad_index: x),
        current_gradient_accumulation_steps=1, off_policy_mask_threshold=None, aux_loss_enabled=False, tools=None,
        environment_factories=None, environments=None, pad_to_multiple_of=None, log_multimodal=False,
        _tokenizer=SimpleNamespace(pad_token_id=0), _pending_extra_logs={}, _pending_metrics={},
        _metrics={"eval": defaultdict(list)},
        _logs={"prompt": [], "completion": [], "advantages": [], "rewards": defaultdict(list)})
    inputs = Trainer._generate_and_score_completions(trainer, [{"prompt": ""}] * 4)
    inputs["old_per_token_logps"] = padded(data.old)  # of an update that is not the first
    logprobs[id(policy)] = new = padded(data.policy).requires_grad_()
    loss = Trainer._compute_loss(trainer, policy, inputs)
    loss.backward()
    return inputs["advantages"].tolist(), loss.item(), torch.cat([row[:n] for row, n in zip(new.grad, LENGTHS)])


def ours(data, config, advantages, rewards, truncated=()):
    """The same by this program, on the tokens that are trained; the gradient of the others is 0."""
    scores = [[None if math.isnan(r) else r for r in row] for row in rewards]
    if advantages.multi_objective_aggregation == "normalize_then_sum":
        found = normalize_then_sum(scores, WEIGHTS[:len(rewards[0])], GROUPS)
    else:
        sums = [None if all(r is None for r in row) else sum(w * r for w, r in zip(WEIGHTS, row) if r is not None)
                for row in scores]
        found = group_advantages(sums, GROUPS, advantages.scale_rewards)
    left_out = truncated if config.mask_truncated_completions else ()
    kept = torch.tensor([i not in left_out for i in SEQUENCE_N.tolist()])
    policy = data.policy.clone().requires_grad_()
    lengths_N = torch.tensor(LENGTHS, dtype=torch.float64)[SEQUENCE_N]
    inputs = LossInputs(policy[kept], data.old[kept], data.sampler[kept], torch.tensor(found)[SEQUENCE_N][kept],
                        SEQUENCE_N[kept], lengths_N[kept], data.entropy[kept], data.entropy[kept], data.ref[kept])
    share = config.top_entropy_quantile
    threshold = quantile(data.entropy.tolist(), 1 - share) if share < 1 else None
    totals = StepTotals(int(kept.sum()), 4 - len(left_out))
    loss = policy_loss(inputs, config, totals, MAX_LENGTH, entropy_threshold=threshold)
    loss.backward()
    return found, loss.item(), policy.grad


def assert_equal(config, advantages=AdvantagesConfig(), rewards=REWARDS, truncated=(), data=None):
    """Advantages, value and gradient; returns the value and the gradient."""
    data = data or draw()
    found, wanted = (one(data, config, advantages, rewards, truncated) for one in (ours, trl))
    assert found[0] == pytest.approx(wanted[0], abs=TOLERANCE)
    assert math.isclose(found[1], wanted[1], abs_tol=TOLERANCE)
    assert (found[2] - wanted[2]).abs().max() < TOLERANCE
    assert max(map(abs, wanted[0])) >= 0.5 and wanted[2].norm() > 0.01, "nothing is compared"
    return wanted[1:]


FIELDS = [
    {}, {"epsilon_high": 0.28}, {"delta": 1.5}, {"beta": 0.1}, {"beta": 0.1, "use_bias_correction_kl": False},
    {"importance_sampling_correction": False}, {"importance_sampling_mode": "token_truncate"},
    {"importance_sampling_mode": "token_mask", "importance_sampling_clip_min": 0.8},
    {"importance_sampling_mode": "sequence_truncate", "importance_sampling_clip_max": 1.1}, {"entropy_coef": 0.01},
    {"importance_sampling_clip_max": 1.1}, {"importance_sampling_clip_max": None, "importance_sampling_clip_min": 0.9},
]
# Neither cispo nor sapo has a clip for delta to bound.
ROWS = [(loss_type, fields) for loss_type in ("dapo", "grpo", "dr_grpo", "cispo", "sapo") for fields in FIELDS
        if loss_type not in ("cispo", "sapo") or "delta" not in fields]


@pytest.mark.parametrize("loss_type, fields", ROWS, ids=str)
def test_equal_to_trl(loss_type, fields):
    """Same value and same gradient of every token's log-prob, from rewards to the loss."""
    assert_equal(LossConfig(loss_type=loss_type, **fields | ({"epsilon_high": 1.3} if loss_type == "cispo" else {})))


NONE = math.nan


@pytest.mark.parametrize("rewards", [REWARDS, [[2.0, -1.0], [0.0, 3.0], [4.0, 4.0], [1.0, 1.0]],
                                     [[2.0, NONE], [0.0, 3.0], [NONE, 0.5], [1.0, 1.0]],
                                     [[2.0, 1.0], [0.0, 3.0], [NONE, NONE], [1.0, 1.0]]],
                         ids=["one", "two", "some missing", "one unscored"])
@pytest.mark.parametrize("fields", [{}, {"scale_rewards": "batch"}, {"scale_rewards": "none"},
                                    {"multi_objective_aggregation": "normalize_then_sum"}], ids=str)
def test_advantages_are_trls(fields, rewards):
    """However they are scaled, of one reward function or two, and where one does not apply or none does."""
    assert_equal(LossConfig(), AdvantagesConfig(**fields), rewards)


@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
def test_case_04_truncated_completions_are_left_out_as_by_trl(loss_type):
    """Where the tokens are counted; by completions TRL counts those left out, and here they are not."""
    config = LossConfig(loss_type=loss_type, epsilon_high=1.3, mask_truncated_completions=True)
    _, gradient = assert_equal(config, truncated=[1])
    assert gradient[SEQUENCE_N == 1].abs().max() == 0


def test_case_01_value_by_trl():
    """Its dapo on the case's numbers, at ratio 1: 10 / 12, as ours in every split."""
    data = draw()
    data.policy = data.sampler = data.old
    advantages, rewards = AdvantagesConfig(scale_rewards="none"), [[2.0], [0.0], [4.0], [0.0]]  # 1, -1, 2, -2
    value, gradient = assert_equal(LossConfig(), advantages, rewards, data=data)
    assert math.isclose(value, 10 / 12, abs_tol=TOLERANCE)
    expected = -torch.tensor([1.0, -1.0, 2.0, -2.0])[SEQUENCE_N] / 12
    assert (gradient - expected).abs().max() < TOLERANCE


def test_equal_to_trl_top_entropy():
    """The token loss over the 30 % of tokens with the highest entropy, normalised by all."""
    _, gradient = assert_equal(LossConfig(top_entropy_quantile=0.3))
    assert 0 < (gradient == 0).sum() < sum(LENGTHS)


@pytest.mark.parametrize("fields", [{}, {"epsilon": 3e-4, "epsilon_high": 4e-4}, {"beta": 0.1}], ids=str)
def test_equal_to_trl_gspo(fields):
    """Sequence-level ratios, with grpo's mean of completions, as TRL recommends for GSPO."""
    assert_equal(LossConfig(loss_type="grpo", importance_sampling_level="sequence", **fields))
