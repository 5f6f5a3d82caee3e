"""Each loss, ratio, KL and sampler weight against numbers worked by hand, value and gradient, in float64."""

import math

import pytest
import torch

from spmd_rl.batch import StepTotals
from spmd_rl.checks import validate
from spmd_rl.config import Config, ConfigError, LossConfig
from spmd_rl.losses import (LOSSES, Loss, LossInputs, importance_ratio, kl_estimate, loss_metrics, lowest_of_top,
                            policy_loss, quantile, sampler_weights, sequence_mean)

E = math.e


def make(log_ratios, advantages, sequences=None, old=None, sampler=None, ref=None, entropy=None, old_entropy=None):
    """Tokens with policy - old = log_ratios; `sequences`: the completion of each, all in one by default."""
    def double(numbers):
        return torch.tensor(numbers, dtype=torch.float64)
    n = len(log_ratios)
    sequence_N = torch.tensor(sequences or [0] * n)
    lengths = torch.bincount(sequence_N)[sequence_N].double()
    old = double(old or [-1.0] * n)
    return LossInputs((old + double(log_ratios)).requires_grad_(), old, old if sampler is None else double(sampler),
                      double(advantages), sequence_N, lengths, double(entropy or [0.0] * n),
                      None if old_entropy is None else double(old_entropy), None if ref is None else double(ref))


def value_and_gradient(inputs, config, totals, **kwargs):
    loss = policy_loss(inputs, config, totals, 8, **kwargs)
    loss.backward()
    return loss.item(), inputs.logprobs_N.grad.tolist()


def config_of(**fields):
    return LossConfig(importance_sampling_correction=False, **fields)


LN2, LN4 = math.log(2), math.log(4)


@pytest.mark.parametrize("fields, log_ratio, advantage, value, gradient", [
    # Ratio 2, epsilon 0.2: the clipped side 1.2 A counts for A > 0, the unclipped 2 A for A < 0 (d r / d logprob = r).
    ({}, LN2, 1.0, -1.2, 0.0),
    ({}, LN2, -1.0, 2.0, 2.0),
    ({}, -LN2, 1.0, -0.5, -0.5),
    ({}, -LN2, -1.0, 0.8, 0.0),
    ({"epsilon_high": 1.5}, LN2, 1.0, -2.0, -2.0),
    # delta 3 bounds a ratio of 4 at A < 0: 3, and no gradient; a ratio of 2 stays.
    ({"delta": 3.0}, LN4, -1.0, 3.0, 0.0),
    ({"delta": 3.0}, LN2, -1.0, 2.0, 2.0),
    # dual clip 3: the loss of A < 0 is at most 3 |A|.
    ({"dual_clip": 3.0}, LN4, -2.0, 6.0, 0.0),
    ({"dual_clip": 3.0}, LN2, -2.0, 4.0, 4.0),
    ({"dual_clip": 3.0}, LN4, 1.0, -1.2, 0.0),
    # cispo: -min(r, 5) A logprob; logprob = -1 + log r. The ratio is a weight: gradient -min(r, 5) A.
    ({"loss_type": "cispo", "epsilon_high": 5.0}, LN2, 1.0, -2 * (LN2 - 1), -2.0),
    ({"loss_type": "cispo", "epsilon_high": 1.5}, LN2, 1.0, -1.5 * (LN2 - 1), -1.5),
    ({"loss_type": "cispo", "epsilon_high": 1.5}, LN2, -1.0, 1.5 * (LN2 - 1), 1.5),
    # sapo at ratio 1: sigmoid(0) * 4 / t = 2 / t, d = -4 sigmoid' r A = -A.
    ({"loss_type": "sapo"}, 0.0, 1.0, -2.0, -1.0),
    ({"loss_type": "sapo"}, 0.0, -1.0, 2 / 1.05, 1.0),
    # sapo at ratio 2, t = 1: sigmoid(1) = 0.7310586; derivative -4 * 0.7310586 * 0.2689414 * 2.
    ({"loss_type": "sapo"}, LN2, 1.0, -2.9242344, -1.5728955),
    # sapo at ratio 2, t = 2 for A < 0: sigmoid(2) * 4 / 2 = 1.7615942; 4 * 0.8807971 * 0.1192029 * 2 = 0.8399487.
    ({"loss_type": "sapo", "sapo_temperature_neg": 2.0}, LN2, -1.0, 1.7615942, 0.8399487),
])
def test_one_token(fields, log_ratio, advantage, value, gradient):
    """Value and gradient of one token that is the whole step."""
    found = value_and_gradient(make([log_ratio], [advantage]), config_of(**fields), StepTotals(1, 1))
    assert found == (pytest.approx(value, abs=1e-7), [pytest.approx(gradient, abs=1e-7)])


def test_sequence_ratio_is_the_geometric_mean():
    """GSPO: log ratios 0.1 and 0.3 of one completion give exp(0.2) for both, another completion has its own."""
    inputs = make([0.1, 0.3, -0.4], [1.0] * 3, [0, 0, 1])
    found = importance_ratio(inputs, config_of(importance_sampling_level="sequence"))
    assert found.tolist() == pytest.approx([math.exp(0.2)] * 2 + [math.exp(-0.4)])
    # d sum / d logprob: each of two tokens moves both ratios by half of exp(0.2).
    found.sum().backward()
    assert inputs.logprobs_N.grad.tolist() == pytest.approx([math.exp(0.2)] * 2 + [math.exp(-0.4)])


def test_sequence_token_has_the_sequences_value_and_the_tokens_gradient():
    """GSPO-token: with an advantage on the first token alone, GSPO moves both, GSPO-token the first."""
    advantages = [1.0, 0.0]
    for level, gradient in (("sequence", [-math.exp(0.1) / 4] * 2), ("sequence_token", [-math.exp(0.1) / 2, 0.0])):
        inputs = make([0.0, 0.2], advantages)
        config = config_of(importance_sampling_level=level)
        value, found = value_and_gradient(inputs, config, StepTotals(2, 1))
        assert value == pytest.approx(-math.exp(0.1) / 2)
        assert found == pytest.approx(gradient)


@pytest.mark.parametrize("estimator, value, gradient", [
    ("k1", 1.0, 1.0), ("k2", 0.5, 1.0), ("k3", 1 / E, 1 - 1 / E)])
def test_kl_estimators(estimator, value, gradient):
    """At policy - reference = 1: k1 = 1, k2 = 1/2, k3 = 1/e - 1 + 1."""
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    found = kl_estimate(logprobs, torch.tensor([-2.0], dtype=torch.float64), estimator)
    found.sum().backward()
    assert (found.item(), logprobs.grad.item()) == (pytest.approx(value), pytest.approx(gradient))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("gap", [1e3, -1e3, 90.0, -90.0])
def test_kl_cannot_overflow(estimator, gap):
    """A reference log-prob of -1000 or +1000 beside the policy's gives a finite value and gradient, in fp32."""
    logprobs = torch.tensor([-1.0], requires_grad=True)
    found = kl_estimate(logprobs, logprobs.detach() - gap, estimator)
    found.sum().backward()
    assert math.isfinite(found.item()) and math.isfinite(logprobs.grad.item())


@pytest.mark.parametrize("estimator, corrected, wanted", [
    ("k1", False, "zero"), ("k1", True, "reverse"), ("k2", False, "reverse"), ("k2", True, "of mean k2"),
    ("k3", False, "forward"), ("k3", True, "reverse")])
def test_the_gradient_that_belongs_to_an_estimator(estimator, corrected, wanted):
    """The table of docs/algorithms.md, exactly: over all tokens of a distribution, through the loss itself (ratio 1,
    each token as often as the policy has it), and told from the others by far."""
    logits = torch.tensor([0.3, -0.2, 1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64), -1)
    policy = torch.log_softmax(logits, -1)
    found = {"zero": 0 * logits.sum(), "reverse": (policy.exp() * (policy - reference)).sum(),
             "forward": (reference.exp() * (reference - policy)).sum(),
             "of mean k2": (policy.exp() * (policy - reference) ** 2 / 2).sum()}
    gradients = {name: torch.autograd.grad(kl, logits, retain_graph=True)[0] for name, kl in found.items()}
    zeros = torch.zeros(3, dtype=torch.float64)
    config = config_of(beta=1.0, kl_estimator=estimator, use_bias_correction_kl=corrected)
    total = zeros.sum()
    for token, probability in enumerate(policy.exp().tolist()):
        one = torch.ones(1, dtype=torch.float64)
        inputs = LossInputs(policy[token:token + 1], policy[token:token + 1].detach(), zeros[:1], zeros[:1],
                            torch.tensor([0]), one, zeros[:1], ref_logprobs_N=reference[token:token + 1])
        total = total + probability * policy_loss(inputs, config, StepTotals(1, 1), 8)
    gradient, = torch.autograd.grad(total, logits)
    assert gradient.tolist() == pytest.approx(gradients.pop(wanted).tolist(), abs=1e-12)
    assert all((gradient - other).abs().max() > 0.05 for other in gradients.values())


@pytest.mark.parametrize("corrected, gradient", [(False, 1 - 1 / E), (True, 1 - 1 / E + 1 / E)])
def test_kl_in_the_loss(corrected, gradient):
    """beta * k3 at ratio 1 and d = 1: value 1/e either way; the correction adds r' k3 = 1/e to the gradient."""
    inputs = make([0.0], [0.0], old=[-1.0], ref=[-2.0])
    config = config_of(beta=0.5, use_bias_correction_kl=corrected)
    value, found = value_and_gradient(inputs, config, StepTotals(1, 1))
    assert (value, found) == (pytest.approx(0.5 / E), [pytest.approx(0.5 * gradient)])


def test_kl_in_the_reward_is_not_in_the_loss():
    """With kl_in reward the loss is that of beta 0."""
    inputs = make([0.0], [0.0], ref=[-2.0])
    assert policy_loss(inputs, config_of(beta=0.5, kl_in="reward"), StepTotals(1, 1), 8).item() == 0.0


@pytest.mark.parametrize("mode, low, high, weights", [
    # old - sampler: log 2 and log 4 of one completion, -log 2 of another. Sums: log 8 and -log 2.
    ("token_truncate", None, 3.0, [2, 3, 0.5]),
    ("token_truncate", 0.7, None, [2, 4, 0.7]),
    ("token_mask", None, 3.0, [2, 0, 0.5]),
    ("token_mask", 0.7, 4.5, [2, 4, 0]),
    ("sequence_truncate", None, 3.0, [3, 3, 0.5]),
    ("sequence_mask", None, 3.0, [0, 0, 0.5]),
    ("sequence_mask", 0.6, None, [8, 8, 0]),
    ("sequence_mask", None, None, [8, 8, 0.5]),
])
def test_sampler_weights(mode, low, high, weights):
    """exp(old - sampler) of a token or a completion, truncated to the bounds or 0 beyond them."""
    inputs = make([0.0] * 3, [1.0] * 3, [0, 0, 1], old=[-1.0, -1.0, -1.0], sampler=[-1 - LN2, -1 - LN4, -1 + LN2])
    config = LossConfig(importance_sampling_mode=mode, importance_sampling_clip_min=low,
                        importance_sampling_clip_max=high)
    assert sampler_weights(inputs, config).tolist() == pytest.approx(weights)
    # They weigh the token loss, -A r / 3 here, and carry no gradient of their own.
    value, gradient = value_and_gradient(inputs, config, StepTotals(3, 2))
    assert value == pytest.approx(-sum(weights) / 3)
    assert gradient == pytest.approx([-w / 3 for w in weights])


def test_mismatch_metrics():
    """Gap log 2: |d| = 0.693147, ratio 2, k3 of the sampler's KL 2 - 1 - log 2; of 3 tokens one is masked."""
    inputs = make([0.0] * 3, [1.0] * 3, old=[-1.0] * 3, sampler=[-1 - LN2, -1.0, -1 - LN4])
    found = loss_metrics(inputs, LossConfig(importance_sampling_mode="token_mask"))
    mean = {name: float(total) / count for name, (total, count) in found.items()}
    assert mean["sampling/sampling_logp_difference/mean"] == pytest.approx((LN2 + LN4) / 3)
    assert mean["sampling/importance_sampling_ratio/mean"] == pytest.approx((2 + 1 + 4) / 3)
    assert mean["sampling/kl"] == pytest.approx(((1 - LN2) + (3 - LN4)) / 3)
    assert mean["sampling/masked_fraction"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("loss_type, wanted", [
    # Ratios 4, 4, 1/2, 1/2 with advantages + - + -. cispo bounds at 3 and counts the first; a clip of [0.8, 1.2] takes
    # the first and the last.
    ("cispo", {"cispo_clip_ratio": 0.25}), ("sapo", {}),
    *((name, {"clip_ratio/low_mean": 0.25, "clip_ratio/high_mean": 0.25, "clip_ratio/region_mean": 0.5})
      for name in ("dapo", "grpo", "dr_grpo"))])
def test_what_the_clip_does_is_counted(loss_type, wanted):
    """By the loss's own rule, and under no name of another's."""
    config = config_of(loss_type=loss_type, epsilon=0.2, epsilon_high=3.0 if loss_type == "cispo" else 0.2)
    found = loss_metrics(make([LN4, LN4, -LN2, -LN2], [1.0, -1.0, 1.0, -1.0], [0, 1, 2, 3]), config)
    mean = {name: float(total) / count for name, (total, count) in found.items() if "clip" in name}
    assert mean == pytest.approx(wanted)
    assert float(found["ratio"][0]) / found["ratio"][1] == pytest.approx((4 + 4 + 0.5 + 0.5) / 4)


def test_sequence_ratios_are_counted_by_tokens():
    """GSPO: log ratios log 2 and log 4 of one completion are (log 8) / 2 for both tokens, 2.83 and above 1.2; another
    completion's token stays. Two of three tokens; the sampler's weights are 2 * 4 for both, and 1."""
    inputs = make([LN2, LN4, 0.0], [1.0] * 3, [0, 0, 1], sampler=[-1 - LN2, -1 - LN4, -1.0])
    config = LossConfig(loss_type="grpo", importance_sampling_level="sequence", importance_sampling_clip_max=None)
    found = loss_metrics(inputs, config)
    mean = {name: float(total) / count for name, (total, count) in found.items()}
    assert mean["ratio"] == pytest.approx((2 * 8 ** 0.5 + 1) / 3)
    assert mean["clip_ratio/high_mean"] == pytest.approx(2 / 3)
    assert mean["sampling/importance_sampling_weight/mean"] == pytest.approx((8 + 8 + 1) / 3)
    assert mean["sampling/importance_sampling_ratio/mean"] == pytest.approx((2 + 4 + 1) / 3)
    assert mean["sampling/masked_fraction"] == 0


def test_entropy_bonus_is_a_mean_over_tokens_for_every_loss():
    """- coef * mean entropy, whatever the loss's own weights: (0.5 + 1.5) / 4 tokens of the step, coef 0.1."""
    for loss_type in ("dapo", "grpo", "dr_grpo", "sapo"):
        inputs = make([0.0, 0.0], [0.0, 0.0], [0, 1], entropy=[0.5, 1.5])
        found = policy_loss(inputs, config_of(loss_type=loss_type, entropy_coef=0.1), StepTotals(4, 2), 8)
        assert found.item() == pytest.approx(-0.1 * 2 / 4)


def test_tokens_below_the_entropy_threshold_are_left_out():
    """Entropies 0.1, 0.9, 0.5, threshold 0.5: two of three tokens stay, over 3 as before; a NaN left out stays out."""
    inputs = make([0.0, 0.0, 0.0], [float("nan"), 1.0, 2.0], old_entropy=[0.1, 0.9, 0.5])
    value, gradient = value_and_gradient(inputs, config_of(top_entropy_quantile=0.5), StepTotals(3, 1),
                                         entropy_threshold=0.5)
    assert value == pytest.approx(-(1 + 2) / 3)
    assert gradient[1:] == pytest.approx([-1 / 3, -2 / 3])


@pytest.mark.parametrize("share, value", [(0.0, 1.0), (1.0, 4.0), (0.5, 2.5), (0.8, 3.4)])
def test_quantile(share, value):
    """Linear between neighbours, as torch.quantile: 0.8 of 1 2 3 4 lies at 0.8 * 3 = 2.4 -> 3.4."""
    values = [3.0, 1.0, 4.0, 2.0]
    assert quantile(values, share) == pytest.approx(value)
    assert quantile(values, share) == pytest.approx(torch.quantile(torch.tensor(values), share).item())


def test_tokens_of_one_distribution_stay_together():
    """The first tokens of a group have the same entropy up to rounding: a threshold among them keeps all or none, in
    whatever order a layout's rounding puts them."""
    for rounding in ([0.0, 1e-6, -1e-6], [1e-6, -1e-6, 0.0]):
        entropies = [1.0] + [2.0 + r for r in rounding] + [3.0, 4.0]
        assert [e >= lowest_of_top(entropies, 0.5) for e in entropies] == [False, True, True, True, True, True]
        assert [e >= lowest_of_top(entropies, 0.2) for e in entropies] == [False] * 4 + [True, True]


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "cispo", "sapo"])
def test_a_row_without_tokens_gives_zero(loss_type, level):
    """What keeps step with the other ranks: value 0 and a graph to the log-probs."""
    empty = torch.zeros(0, requires_grad=True)
    inputs = LossInputs(empty, empty.detach(), empty.detach(), empty.detach(), torch.zeros(0, dtype=torch.long),
                        empty.detach(), empty.detach(), empty.detach(), empty.detach())
    config = LossConfig(loss_type=loss_type, importance_sampling_level=level, epsilon_high=5.0, beta=0.1,
                        entropy_coef=0.1)
    found = policy_loss(inputs, config, StepTotals(5, 2), 8)
    found.backward()
    assert found.item() == 0.0


@pytest.mark.parametrize("gap", [200.0, -200.0])
@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "sapo"])
def test_no_ratio_overflows(loss_type, gap):
    """Policy and old policy 200 nats apart: value and gradient are finite in fp32."""
    logprobs = torch.tensor([-1.0], requires_grad=True)
    one, old = torch.ones(1), torch.tensor([-1.0 - gap])
    inputs = LossInputs(logprobs, old, old - gap, -one, torch.zeros(1, dtype=torch.long), one, one)
    found = policy_loss(inputs, LossConfig(loss_type=loss_type, epsilon_high=5.0, importance_sampling_clip_max=None,
                                           importance_sampling_mode="token_truncate"), StepTotals(1, 1), 8)
    found.backward()
    assert math.isfinite(found.item()) and math.isfinite(logprobs.grad.item())


def test_a_new_loss_is_an_entry_of_the_table(monkeypatch):
    """Nothing else has to know it: the checks take it, it has weights and clip metrics of its own, and goes with KL,
    entropy bonus and the sampler's weights. Squared log-probs over the completions: ((1 + 4) / 2 + 9) / 2."""
    def squares(inputs, config):
        return inputs.logprobs_N.square()

    monkeypatch.setitem(LOSSES, "squares", Loss(squares, sequence_mean, lambda ratio_N, advantages_N, config: {
        "above_one": (ratio_N > 1).float()}))
    config = Config(loss=LossConfig(loss_type="squares"))
    config.model.path, config.data.train = "somewhere", "org/prompts"
    validate(config, 1)
    config.loss.delta = 3.0
    with pytest.raises(ConfigError, match="squares has no clip"):
        validate(config, 1)
    inputs = make([0.0, -1.0, -2.0], [1.0] * 3, [0, 0, 1], ref=[-2.0] * 3, entropy=[1.0] * 3)
    value, gradient = value_and_gradient(inputs, config_of(loss_type="squares"), StepTotals(3, 2))
    assert (value, gradient) == (pytest.approx(5.75), pytest.approx([-0.5, -1.0, -3.0]))
    found = loss_metrics(inputs, config.loss)
    assert "above_one" in found and "clip_ratio/region_mean" not in found
    more = LossConfig(loss_type="squares", beta=0.1, entropy_coef=0.1, importance_sampling_mode="token_truncate")
    assert math.isfinite(policy_loss(inputs, more, StepTotals(3, 2), 8).item())
