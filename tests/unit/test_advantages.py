"""Advantages: a group is its id, and equal rewards teach nothing."""

import itertools

import pytest

from spmd_rl.advantages import group_advantages, group_spread
from spmd_rl.batch import Prompt
from spmd_rl.config import RewardsConfig
from spmd_rl.rewards import Rewards

# Prompt 1: mean 0.5, sample variance 4 * 0.25 / 3 = 1/3, so 0.5 / sqrt(1/3) = 0.866025.
# Prompt 2: mean 0.25, sample variance (3 * 0.0625 + 0.5625) / 3 = 0.25, so -0.25 / 0.5 = -0.5 and 0.75 / 0.5 = 1.5.
REWARDS = {1: [1.0, 0.0, 1.0, 0.0], 2: [0.0, 0.0, 0.0, 1.0]}
EXPECTED = {1: [0.866025, -0.866025, 0.866025, -0.866025], 2: [-0.5, -0.5, -0.5, 1.5]}
DELIVERIES = {
    "adjacent": [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3)],
    "interleaved": [(1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (2, 3)],
    "mixed": [(2, 3), (1, 2), (1, 0), (2, 1), (2, 0), (1, 3), (1, 1), (2, 2)],
}


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_case_07_advantage_does_not_depend_on_the_order_of_delivery(delivery):
    """A completion is compared with those of its own prompt, in whatever order the engine delivers.

    Reshaping to (prompts, generations) breaks it: interleaved it gives 1.5, -0.5, -0.5, -0.5, ...
    """
    order = DELIVERIES[delivery]
    found = group_advantages([REWARDS[g][i] for g, i in order], [g for g, _ in order], epsilon=0.0)
    assert found == pytest.approx([EXPECTED[g][i] for g, i in order], abs=1e-6)


def test_case_07_rows_of_equal_text_stay_two_groups_with_their_own_answers(completion):
    """Two rows of the data with one text and other answers are scored and compared apart.

    Keying by the prompt's text merges them: mean 0.5 over eight instead of 0.75 and 0.25 over four.
    """
    rows = [Prompt(row, "2+2?", [1], {"answer": answer}) for row, answer in ((0, "4"), (1, "four"))]
    texts = ["4", "4", "4", "no", "4", "4", "4", "four"]
    completions = [completion([1], group=i // 4, sample=i % 4, text=text) for i, text in enumerate(texts)]
    Rewards(RewardsConfig()).score([rows[c.group] for c in completions], completions)
    assert [c.reward for c in completions] == [1, 1, 1, 0, 0, 0, 0, 1]
    found = group_advantages([c.reward for c in completions], [c.group for c in completions], epsilon=0.0)
    # Three of four and one of four: sample std 0.5 both.
    assert found == pytest.approx([0.5, 0.5, 0.5, -1.5, -0.5, -0.5, -0.5, 1.5])


@pytest.mark.parametrize("epsilon, expected", [(0.0, 0.5 / (1 / 3) ** 0.5), (1e-4, 0.5 / ((1 / 3) ** 0.5 + 1e-4))])
def test_epsilon_is_added_to_the_deviation(epsilon, expected):
    """The divisor is sample std + epsilon, not the root of variance + epsilon."""
    assert group_advantages(REWARDS[1], [0] * 4, epsilon=epsilon)[0] == pytest.approx(expected, rel=1e-12)


def test_scale_none_only_centres():
    """Without scaling an advantage is the reward less the group's mean."""
    found = group_advantages([1.0, 0.0, 3.0, 5.0], [7, 7, -2, -2], scale="none")
    assert found == [0.5, -0.5, -1.0, 1.0]


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3, -1e9])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_equal_rewards_give_no_advantage(scale, value, size):
    """A group whose rewards are all equal gets 0: the rounding of its mean over an epsilon would be a signal."""
    found = group_advantages([value] * size, [0] * size, scale)
    assert found == pytest.approx([0.0] * size, abs=abs(value) * 1e-15 if scale == "none" else 0)


@pytest.mark.parametrize("order", list(itertools.permutations(range(5)))[::17])
def test_any_permutation_permutes_the_advantages(order):
    """Advantages follow their completions through a permutation, groups of unequal size included."""
    rewards, groups = [1.0, 2.0, 4.0, -3.0, 0.5], [3, 3, 3, 9, 9]
    whole = group_advantages(rewards, groups)
    assert group_advantages([rewards[i] for i in order], [groups[i] for i in order]) == pytest.approx(
        [whole[i] for i in order])


def test_lengths_that_differ_are_refused():
    """A missing group id is an error, not a shorter result."""
    with pytest.raises(ValueError):
        group_advantages([1.0, 2.0], [0])


def test_spread_counts_flat_groups():
    """(sample std of each group, groups without any spread): [0, 2] has std sqrt(2), [5, 5] none."""
    deviations, flat = group_spread([0.0, 5.0, 2.0, 5.0], [0, 1, 0, 1])
    assert deviations == pytest.approx([2 ** 0.5, 0.0])
    assert flat == 1
