"""The loss is one number for a step: no split into micro-batches changes it or its gradient."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from spmd_rl.advantages import group_advantages
from spmd_rl.batch import StepTotals, pack
from spmd_rl.config import LossConfig
from spmd_rl.logprobs import LogprobHead
from spmd_rl.losses import LOSSES, LossInputs, kl_estimate, loss_metrics, policy_loss

ADVANTAGES, LENGTHS = [1.0, -1.0, 2.0, -2.0], [1, 3, 2, 6]
MAX_LENGTH = 8
TOKEN_MEAN = [-a / 12 for a in ADVANTAGES]
SEQUENCE_MEAN = [-a / (4 * n) for a, n in zip(ADVANTAGES, LENGTHS)]
# Loss -> fields, value and each token's coefficient at ratio 1 and log-prob -1.
# Token mean: -(1*1 - 1*3 + 2*2 - 2*6) / 12 = 10/12. Sequence mean: -(1 - 1 + 2 - 2) / 4. Constant: 10 / (4 * 8).
# cispo: -A logprob = A a token: -10/12. sapo: -sigmoid(0) 4 / t A = -2 A / t, with t = 1.05 for A < 0; slope -A.
FAMILY = {
    "dapo": ({}, 10 / 12, TOKEN_MEAN),
    "grpo": ({"loss_type": "grpo"}, 0.0, SEQUENCE_MEAN),
    "dr_grpo": ({"loss_type": "dr_grpo"}, 10 / 32, [-a / (4 * MAX_LENGTH) for a in ADVANTAGES]),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 5.0}, -10 / 12, TOKEN_MEAN),
    "sapo": ({"loss_type": "sapo"}, (-2 + 2 / 1.05 - 4 + 4 / 1.05) / 4, SEQUENCE_MEAN),
    "gspo": ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, 0.0, SEQUENCE_MEAN),
    "gspo-token": ({"importance_sampling_level": "sequence_token"}, 10 / 12, TOKEN_MEAN),
}
CLIPPING = ["dapo", "grpo", "dr_grpo"]
PERMUTATIONS = list(itertools.permutations(range(4)))
# Where a permuted list of four is cut: none, one, two or three of the three gaps.
CUTS = [cut for n in range(4) for cut in itertools.combinations((1, 2, 3), n)]


def inputs_of(mb, dtype=torch.float64, shift=0.0):
    """Loss inputs of a packed row at ratio exp(shift), the log-probs a leaf."""
    old = mb.sampler_logprobs_N.to(dtype)
    logprobs = (old + shift).requires_grad_()
    return LossInputs(logprobs, old, old, mb.advantages_N.to(dtype), mb.sequence_N, mb.lengths_N.to(dtype),
                      torch.zeros_like(old))


def tokens(values, advantages=None, old=None, ref=None, lengths=None, sampler=None, entropy=None):
    """Loss inputs of single tokens in float64."""
    def double(numbers):
        return torch.tensor(numbers, dtype=torch.float64)
    n = len(values)
    old = double(old or [0.0] * n)
    return LossInputs(double(values).requires_grad_(), old, old if sampler is None else double(sampler),
                      double(advantages or [1.0] * n), torch.arange(n), double(lengths or [float(n)] * n),
                      double(entropy or [0.0] * n), ref_logprobs_N=None if ref is None else double(ref))


def split_coefficients(completions, rows, config, totals):
    """(sum of the rows' parts, coefficient of each token by completion)."""
    total, coefficients = 0.0, {}
    for row in rows:
        mb = pack([completions[i] for i in row], torch.device("cpu"))
        inputs = inputs_of(mb)
        part = policy_loss(inputs, config, totals, MAX_LENGTH)
        part.backward()
        total += part.item()
        for place, i in enumerate(row):
            coefficients[i] = inputs.logprobs_N.grad[mb.sequence_N == place].tolist()
    return total, coefficients


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: "cut" + "-".join(map(str, cut)))
@pytest.mark.parametrize("loss", FAMILY)
def test_case_01_no_split_and_no_order_changes_the_loss(completion, loss, cut):
    """Parts of all micro-batches add up to the step's loss, with the same coefficient on each token.

    A mean a micro-batch, then a mean of means, breaks it: 0.75 on {1,2},{3,4}, coefficients 1/8 and 1/16.
    """
    completions = [completion([9] * n, advantage=a) for a, n in zip(ADVANTAGES, LENGTHS)]
    totals = StepTotals.of(completions)
    assert (totals.tokens, totals.sequences) == (12, 4)
    fields, value, expected = FAMILY[loss]
    for order in PERMUTATIONS:
        bounds = [0, *cut, 4]
        rows = [order[a:b] for a, b in zip(bounds, bounds[1:])]
        total, coefficients = split_coefficients(completions, rows, LossConfig(**fields), totals)
        assert total == pytest.approx(value, abs=1e-12)
        for i in range(4):
            assert coefficients[i] == pytest.approx([expected[i]] * LENGTHS[i], abs=1e-12)


EXTRAS = {
    "plain": {}, "kl": {"beta": 0.3}, "kl-k2": {"beta": 0.3, "kl_estimator": "k2", "use_bias_correction_kl": False},
    "entropy": {"entropy_coef": 0.1}, "token_mask": {"importance_sampling_mode": "token_mask"},
    "sequence_truncate": {"importance_sampling_mode": "sequence_truncate", "importance_sampling_clip_max": 1.1},
}


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("loss", FAMILY)
def test_case_01_no_split_changes_value_gradient_or_metrics_at_any_ratio(completion, loss, extra):
    """The same away from ratio 1, with KL, entropy bonus, sampler weights: one row, two, and a row each, any order."""
    g = torch.Generator().manual_seed(4)
    completions = [completion([9] * n, advantage=a) for a, n in zip(ADVANTAGES, LENGTHS)]
    totals = StepTotals.of(completions)
    drawn = [{name: torch.randn(n, generator=g, dtype=torch.float64) for name in ("new", "sampler", "ref", "entropy")}
             for n in LENGTHS]
    config = LossConfig(**FAMILY[loss][0] | EXTRAS[extra])
    found = []
    for rows in ([(0, 1, 2, 3)], [(2, 1), (3, 0)], [(3,), (2,), (0,), (1,)], [(1,), (0, 3, 2), ()]):
        total, coefficients, sums = 0.0, {}, {}
        for row in rows:
            mb = pack([completions[i] for i in row], torch.device("cpu"))
            values = {name: torch.cat([drawn[i][name] for i in row]) if row else torch.zeros(0, dtype=torch.float64)
                      for name in drawn[0]}
            old = torch.full_like(values["new"], -1.0)
            inputs = LossInputs((old + 0.3 * values["new"]).requires_grad_(), old, old + 0.2 * values["sampler"],
                                mb.advantages_N.double(), mb.sequence_N, mb.lengths_N.double(), values["entropy"],
                                ref_logprobs_N=old + 0.5 * values["ref"])
            part = policy_loss(inputs, config, totals, MAX_LENGTH)
            part.backward()
            total += part.item()
            for place, i in enumerate(row):
                coefficients[i] = inputs.logprobs_N.grad[mb.sequence_N == place].tolist()
            for name, (value, count) in loss_metrics(inputs, config).items():
                before = sums.get(name, (0.0, 0))
                sums[name] = (before[0] + float(value), before[1] + count)
        found.append((total, [x for i in range(4) for x in coefficients[i]], {n: s / c for n, (s, c) in sums.items()}))
    for other in found[1:]:
        assert other[0] == pytest.approx(found[0][0], abs=1e-12)
        assert other[1] == pytest.approx(found[0][1], abs=1e-12)
        assert other[2] == pytest.approx(found[0][2], abs=1e-12)


GROUPED = [(group, sample) for group in (1, 2) for sample in range(4)]
REWARDS = {1: [1.0, 0.0, 1.0, 0.0], 2: [0.0, 0.0, 0.0, 1.0]}
GROUP_ADVANTAGES = {1: [0.866025, -0.866025, 0.866025, -0.866025], 2: [-0.5, -0.5, -0.5, 1.5]}


@pytest.mark.parametrize("delivery", ["adjacent", "interleaved"])
@pytest.mark.parametrize("loss", FAMILY)
def test_case_07_no_loss_depends_on_the_order_of_delivery(completion, loss, delivery):
    """Each token's coefficient is that of its own group's advantage, in whatever order completions come.

    Two tokens a completion, 16 and 8 in the step: -A / 16 in every token mean and every mean of completions, -A / 64
    by the constant length 8.
    """
    order = GROUPED if delivery == "adjacent" else sorted(GROUPED, key=lambda place: (place[1], place[0]))
    advantages = group_advantages([REWARDS[g][i] for g, i in order], [g for g, _ in order], epsilon=0.0)
    completions = [completion([9, 9], advantage=a, group=g, sample=i) for a, (g, i) in zip(advantages, order)]
    weight = 1 / 64 if loss == "dr_grpo" else 1 / 16
    _, coefficients = split_coefficients(completions, [range(0, 3), range(3, 8)], LossConfig(**FAMILY[loss][0]),
                                         StepTotals.of(completions))
    for place, (g, i) in enumerate(order):
        assert coefficients[place] == pytest.approx([-GROUP_ADVANTAGES[g][i] * weight] * 2, abs=1e-6)


@pytest.mark.parametrize("temperature, sampled", [(1.0, -0.440190), (0.6, -0.208060), (0.5, -0.145078)])
@pytest.mark.parametrize("loss", FAMILY)
def test_case_75_no_temperature_moves_the_ratios(loss, temperature, sampled):
    """Logits 2 1 0 -1, token 0, sampled at T: ratio and sampler weight are 1, the loss is that of ratio 1, and the
    gradient by the logits that of log-softmax(logits / T): A (p - onehot) / T.

    The raw log-prob at T = 0.6 would weigh the token by 1.26; a raw one over T, -0.733650, by 0.6.
    """
    weight_VH = torch.tensor([[2.0], [1.0], [0.0], [-1.0]])
    head = LogprobHead(torch.nn.Parameter(weight_VH), 1.0)
    logprobs_N, entropy_N = head(torch.ones(1, 1), torch.tensor([0]), temperature)
    old, one = logprobs_N.detach(), torch.ones(1)
    inputs = LossInputs(logprobs_N, old, torch.tensor([sampled]), -one, torch.tensor([0]), one, entropy_N)
    config = LossConfig(**FAMILY[loss][0])
    metrics = {name: float(value) / count for name, (value, count) in loss_metrics(inputs, config).items()}
    assert metrics["ratio"] == 1.0
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=1e-5)
    found = policy_loss(inputs, config, StepTotals(1, 1), 1)
    found.backward()
    value = {"cispo": sampled, "sapo": 2 / 1.05}.get(loss, 1.0)  # cispo: A = -1 times -logprob
    assert found.item() == pytest.approx(value, abs=1e-5)
    probabilities = torch.softmax(weight_VH[:, 0] / temperature, 0)
    expected = (torch.tensor([1.0, 0, 0, 0]) - probabilities) / temperature
    assert head.weight.grad[:, 0].tolist() == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("loss_type", CLIPPING)
def test_a_row_without_targets_adds_exactly_nothing(loss_type):
    """An empty row's part is 0 with a graph behind it: its backward is as collective as the others'."""
    inputs = inputs_of(pack([], torch.device("cpu")), torch.float32)
    part = policy_loss(inputs, LossConfig(loss_type=loss_type), StepTotals(12, 4), MAX_LENGTH)
    assert part.item() == 0.0
    part.backward()
    assert inputs.logprobs_N.grad.shape == (0,)


@pytest.mark.parametrize("loss_type", CLIPPING)
def test_a_step_without_any_token_has_loss_zero(loss_type):
    """Nothing to train on is 0, not 0/0."""
    inputs = inputs_of(pack([], torch.device("cpu")), torch.float32)
    assert policy_loss(inputs, LossConfig(loss_type=loss_type), StepTotals(0, 0), MAX_LENGTH).item() == 0.0


# Ratio and advantage -> token loss and its derivative by the log-prob, at epsilon 0.2 below and `high` above.
# min(r A, clip(r) A): 0.7 with A > 0 and 1.3 with A < 0 stay unclipped, d/dlogp (-r A) = -r A.
CLIPPED = [
    (0.7, 1.0, 0.2, -0.7, -0.7), (0.7, -1.0, 0.2, 0.8, 0.0),
    (1.3, 1.0, 0.2, -1.2, 0.0), (1.3, -1.0, 0.2, 1.3, 1.3),
    (1.3, 1.0, 0.4, -1.3, -1.3), (1.5, 1.0, 0.4, -1.4, 0.0), (0.7, -2.0, 0.4, 1.6, 0.0),
    (1.0, 3.0, 0.2, -3.0, -3.0), (1.0, 0.0, 0.2, 0.0, 0.0),
]


@pytest.mark.parametrize("ratio, advantage, high, loss, gradient", CLIPPED)
@pytest.mark.parametrize("loss_type", CLIPPING)
def test_clipped_surrogate(loss_type, ratio, advantage, high, loss, gradient):
    """-min(r A, clip(r) A), both sides with their own epsilon; the clip takes the gradient only where it binds."""
    inputs = tokens([math.log(ratio)], [advantage])
    found = LOSSES[loss_type][0](inputs, LossConfig(loss_type=loss_type, epsilon=0.2, epsilon_high=high))
    found.sum().backward()
    assert found.item() == pytest.approx(loss, abs=1e-12)
    assert inputs.logprobs_N.grad.item() == pytest.approx(gradient, abs=1e-12)


def test_epsilon_high_falls_back_to_epsilon():
    """Without epsilon_high the range is symmetric: 1.3 at A = 1 and epsilon 0.1 is clipped to 1.1."""
    inputs = tokens([math.log(1.3)])
    assert policy_loss(inputs, LossConfig(epsilon=0.1), StepTotals(1, 1), 8).item() == pytest.approx(-1.1)


@pytest.mark.parametrize("padded", [0, 1, 5])
def test_case_09_clip_metrics_count_clipped_tokens_only(completion, padded):
    """The clip fraction counts tokens whose gradient the clip takes, and no padding.

    Ratios .7 .7 1.3 1.3 with A + - + -: the 2nd and 3rd are clipped. Without the advantage's sign it is all four.
    """
    ratios, advantages = [0.7, 0.7, 1.3, 1.3], [1.0, -1.0, 1.0, -1.0]
    row = [completion([9], advantage=a) for a in advantages]
    mb = pack(row, torch.device("cpu"), block=8 + padded)
    assert mb.input_ids_S.numel() == 8 + padded
    old = mb.sampler_logprobs_N.double()
    inputs = replace(inputs_of(mb), logprobs_N=old + torch.tensor(ratios, dtype=torch.float64).log())
    loss = policy_loss(inputs, LossConfig(), StepTotals.of(row), 8)
    assert loss.item() == pytest.approx((-0.7 + 0.8 - 1.2 + 1.3) / 4)  # 0.05
    found = {n: float(s) / c for n, (s, c) in loss_metrics(inputs, LossConfig()).items()}
    assert found["clip_ratio/region_mean"] == 0.5
    assert found["clip_ratio/low_mean"] == 0.25
    assert found["clip_ratio/high_mean"] == 0.25
    assert found["ratio"] == pytest.approx(1.0)


@pytest.mark.parametrize("ratio, advantage, low, high", [
    (0.79, -1.0, 1, 0), (0.79, 1.0, 0, 0), (0.81, -1.0, 0, 0), (1.0, -1.0, 0, 0), (1.0, 1.0, 0, 0),
    (1.29, 1.0, 0, 0), (1.31, 1.0, 0, 1), (1.31, -1.0, 0, 0), (0.5, 0.0, 0, 0), (2.0, 0.0, 0, 0)])
def test_case_09_each_side_has_its_sign_and_its_epsilon(ratio, advantage, low, high):
    """Low counts ratios below 1 - epsilon with A < 0, high those above 1 + epsilon_high with A > 0."""
    config = LossConfig(epsilon=0.2, epsilon_high=0.3)
    inputs = tokens([math.log(ratio)], [advantage])
    found = loss_metrics(inputs, config)
    assert float(found["clip_ratio/low_mean"][0]) == low
    assert float(found["clip_ratio/high_mean"][0]) == high
    assert float(found["clip_ratio/region_mean"][0]) == low + high


@pytest.mark.parametrize("loss_type, value", [("dapo", 4 / 12), ("grpo", 0.0)])
def test_case_09_a_first_step_of_loss_zero_still_learns(completion, loss_type, value):
    """Zero-sum advantages at ratio 1: the loss may be 0, the gradient is not.

    -(1.5*1 - 0.5*3 - 0.5*2 - 0.5*6) / 12 = 4/12; a mean a completion: -(1.5 - 0.5 - 0.5 - 0.5) / 4 = 0.
    """
    row = [completion([9] * n, advantage=a) for a, n in zip([1.5, -0.5, -0.5, -0.5], LENGTHS)]
    inputs = inputs_of(pack(row, torch.device("cpu")))
    loss = policy_loss(inputs, LossConfig(loss_type=loss_type), StepTotals.of(row), 8)
    loss.backward()
    assert loss.item() == pytest.approx(value, abs=1e-12)
    assert inputs.logprobs_N.grad.norm() > 0.1


@pytest.mark.parametrize("policy, ref, value, gradient", [
    (-1.0, -1.0, 0.0, 0.0),
    (-1.0, -2.0, 0.36787944, 0.63212056),  # d = -1: 1/e + 1 - 1; derivative 1 - e^d
    (-2.0, -1.0, 0.71828183, -1.71828183),  # d = 1: e - 1 - 1
    (-1.0, -1.0 + 1e-9, 5e-19, -1e-9),  # d^2 / 2; exp(d) - 1 would round to 0 or 1e-16
])
def test_kl_k3(policy, ref, value, gradient):
    """exp(d) - d - 1 with d = ref - policy: never negative, 0 only where they agree."""
    inputs = tokens([policy], ref=[ref])
    found = kl_estimate(inputs.logprobs_N, inputs.ref_logprobs_N, "k3")
    found.backward()
    assert found.item() == pytest.approx(value, rel=1e-6, abs=1e-17)
    assert inputs.logprobs_N.grad.item() == pytest.approx(gradient, rel=1e-6, abs=1e-15)


@pytest.mark.parametrize("loss_type, weights", [("dapo", [1 / 4, 1 / 4]), ("grpo", [1 / 2, 1 / 6]),
                                                ("dr_grpo", [1 / 16, 1 / 16])])
def test_kl_is_weighed_as_the_token_loss_is(loss_type, weights):
    """beta * k3 is added token by token under the same normaliser; with beta 0 the reference is not looked at.

    Two tokens of completions of 1 and 3 tokens, 4 tokens and 2 completions in the step, A = 0, beta 0.5.
    """
    inputs = tokens([-1.0, -2.0], [0.0, 0.0], old=[-1.0, -2.0], ref=[-2.0, -1.0], lengths=[1.0, 3.0])
    config = LossConfig(loss_type=loss_type, beta=0.5, use_bias_correction_kl=False)
    found = policy_loss(inputs, config, StepTotals(4, 2), 8)
    found.backward()
    assert found.item() == pytest.approx(0.5 * (weights[0] * 0.36787944 + weights[1] * 0.71828183), abs=1e-8)
    assert inputs.logprobs_N.grad.tolist() == pytest.approx(
        [0.5 * weights[0] * 0.63212056, -0.5 * weights[1] * 1.71828183], abs=1e-8)
    assert policy_loss(inputs, LossConfig(loss_type=loss_type), StepTotals(4, 2), 8).item() == 0.0
    metric, count = loss_metrics(inputs, LossConfig())["kl"]
    assert (float(metric), count) == (pytest.approx(0.36787944 + 0.71828183), 2)


@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (1, 3), (2,), (4,), (3, 3)])
def test_a_user_loss_of_another_shape_is_refused(shape):
    """One loss a token or an error: a scalar or a column would broadcast into a wrong sum."""
    inputs = tokens([-1.0, -2.0, -3.0])
    with pytest.raises(ValueError, match=r"my:loss.*\(3,\)"):
        policy_loss(inputs, LossConfig(loss_type="my:loss"), StepTotals(3, 1), 8, lambda i, c: torch.ones(shape))


def test_a_user_loss_is_weighed_by_the_steps_tokens():
    """Squared log-probs over 6 tokens of the step: (1 + 4) / 6, gradient 2 x / 6."""
    inputs = tokens([-1.0, -2.0])
    found = policy_loss(inputs, LossConfig(loss_type="my:loss"), StepTotals(6, 2), 8, lambda i, c: i.logprobs_N ** 2)
    found.backward()
    assert found.item() == pytest.approx(5 / 6)
    assert inputs.logprobs_N.grad.tolist() == pytest.approx([-2 / 6, -4 / 6])


def test_the_gap_to_the_sampler_is_measured_on_old_logprobs():
    """|old - sampler| and exp(old - sampler): 0.5 and e^0.5, 0 and 1 -> sums 0.5 and 2.648721; no gradient."""
    inputs = tokens([0.0, 0.0], old=[-1.0, -2.0], sampler=[-1.5, -2.0], entropy=[0.25, 0.5])
    found = loss_metrics(inputs, LossConfig())
    assert float(found["sampling/sampling_logp_difference/mean"][0]) == pytest.approx(0.5)
    assert float(found["sampling/importance_sampling_ratio/mean"][0]) == pytest.approx(math.exp(0.5) + 1)
    assert float(found["entropy"][0]) == pytest.approx(0.75)
    assert all(count == 2 and not total.requires_grad for total, count in found.values())
    assert "kl" not in found


def test_ratio_is_exactly_one_on_the_current_logprobs():
    """Old log-probs that are the current ones detached give ratio 1 bit for bit, in float32 too."""
    logprobs = torch.randn(100).mul(30).requires_grad_()
    ones = torch.ones(100)
    inputs = LossInputs(logprobs, logprobs.detach(), logprobs.detach(), ones, torch.arange(100), ones, ones)
    total, count = loss_metrics(inputs, LossConfig())["ratio"]
    assert float(total) == count == 100
