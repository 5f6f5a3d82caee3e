"""Advantages: a group is its id, and equal rewards teach nothing."""

import itertools

import pytest

from spmd_rl.advantages import group_advantages, group_spread, normalize_then_sum
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
    """Sample std of each group: [0, 2] has sqrt(2), [5, 5] none, and one without any score none either."""
    found = group_spread([0.0, 5.0, 2.0, 5.0, None], [0, 1, 0, 1, 2])
    assert found == {0: pytest.approx(2 ** 0.5), 1: 0.0, 2: 0.0}


def test_leave_one_out():
    """RLOO: 3 less the mean of 1 and 2 is 1.5; 1 less 2.5 is -1.5; 2 less 2 is 0. = n / (n - 1) * (r - mean)."""
    assert group_advantages([3.0, 1.0, 2.0], [0] * 3, "none", "leave_one_out") == pytest.approx([1.5, -1.5, 0.0])


def test_scale_by_the_batch():
    """[0, 2] and [1, 1]: differences -1, 1, 0, 0 over the std of 0 2 1 1, sqrt(2/3)."""
    found = group_advantages([0.0, 2.0, 1.0, 1.0], [0, 0, 1, 1], "batch", epsilon=0.0)
    assert found == pytest.approx([-1 / (2 / 3) ** 0.5, 1 / (2 / 3) ** 0.5, 0.0, 0.0])


def test_whiten():
    """REINFORCE++ with baseline: differences -1 1 0 0 have mean 0 and std sqrt(2/3)."""
    found = group_advantages([0.0, 2.0, 1.0, 1.0], [0, 0, 1, 1], "whiten", epsilon=0.0)
    assert found == pytest.approx([-1 / (2 / 3) ** 0.5, 1 / (2 / 3) ** 0.5, 0.0, 0.0])
    assert sum(found) == pytest.approx(0.0)


def test_unscored_completions_move_nothing():
    """None stands in no mean and no deviation; its advantage is 0: [0, 2] as without it."""
    for scale in ("group", "batch", "whiten", "none"):
        found = group_advantages([0.0, None, 2.0], [0, 0, 0], scale, epsilon=0.0)
        whole = group_advantages([0.0, 2.0], [0, 0], scale, epsilon=0.0)
        assert found == pytest.approx([whole[0], 0.0, whole[1]])


def test_a_partial_group_of_one_teaches_nothing():
    """One member has no others and no deviation: 0 in every estimator."""
    for scale in ("group", "none"):
        for baseline in ("mean", "leave_one_out"):
            assert group_advantages([5.0, 1.0, 3.0], [7, 8, 8], scale, baseline)[0] == 0.0


def test_normalize_then_sum():
    """Two rewards of very different size count the same: each is brought to +-0.7071 in its group, then weighed."""
    scores = [[0.0, 100.0], [1.0, 0.0], [0.0, 0.0], [1.0, 100.0]]
    found = normalize_then_sum(scores, [1.0, 1.0], [0, 0, 1, 1], epsilon=0.0)
    # Group 0: (-, +) and (+, -) cancel; group 1: (-, -) and (+, +) give -+ sqrt(2), whitened by std sqrt(4/3).
    assert found == pytest.approx([0.0, 0.0, -2 ** 0.5 / (4 / 3) ** 0.5, 2 ** 0.5 / (4 / 3) ** 0.5])


def test_normalize_then_sum_weighs_and_leaves_out():
    """Weights 2 and -1, no score of the second function for one completion, none at all for another.

    Group 0, by function: [3, 1] -> +-r with r = 1 / sqrt(2), and [5, None] -> 0, 0. Group 1: [1, None] -> 0, 0, and
    [2, None] -> 0, 0. Sums 2r, -2r, 0; the unscored one stands out: mean 0, std 2r over three.
    """
    scores = [[3.0, 5.0], [1.0, None], [1.0, 2.0], [None, None]]
    found = normalize_then_sum(scores, [2.0, -1.0], [0, 0, 1, 1], epsilon=0.0)
    assert found == pytest.approx([1.0, -1.0, 0.0, 0.0])
