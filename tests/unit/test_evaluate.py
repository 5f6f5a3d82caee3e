"""Evaluation: pass@k by the unbiased estimator, and what counts as right."""

import itertools
from fractions import Fraction

import pytest

from spmd_rl.config import EvaluateConfig
from spmd_rl.evaluate import first_accuracy, pass_at_k, powers_of_two, set_metrics


@pytest.mark.parametrize("num_samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(num_samples):
    """Every subset of k samples, counted one by one, for every number of right ones."""
    for correct in range(num_samples + 1):
        for k in range(1, num_samples + 1):
            subsets = list(itertools.combinations(range(num_samples), k))
            hits = Fraction(sum(min(subset) < correct for subset in subsets), len(subsets))
            assert pass_at_k(num_samples, correct, k) == pytest.approx(float(hits), abs=1e-15)


def test_the_plain_estimator_would_be_biased():
    """2 of 4 right: pass@2 is 1 - C(2, 2) / C(4, 2) = 5/6; 1 - (1 - 1/2)^2 = 3/4 is not it."""
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6)


@pytest.mark.parametrize("most, expected", [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_k_doubles_up_to_all(most, expected):
    """1, 2, 4, ... and the number of completions itself."""
    assert powers_of_two(most) == expected


def test_metrics_of_a_set_by_hand(completion):
    """Groups with 4, 1 and 0 of 4 right, one that failed in part, and one that cannot be scored (left out).

    pass@1 (1 + 1/4 + 0 + 1/4) / 4 = 0.375; pass@2 (1 + 1/2 + 0 + 1/2) / 4 = 0.5; pass@4 (1 + 1 + 0 + 1) / 4 = 0.75.
    """
    rewards = [[1, 1, 1, 1], [1, 0.5, 0, 0], [0, 0, 0, 0], [1, 0, None, None], [None] * 4]
    completions = [completion([7], group=g, sample=s, rewards=[r, 0.5], reward=r,
                              failures={"exact": "timeout"} if r is None and g == 3 else {})
                   for g, group in enumerate(rewards) for s, r in enumerate(group)]
    found = set_metrics(completions, ["exact", "form"], EvaluateConfig(num_generations=4, temperature=1.0))
    assert {name: value for name, value in found.items() if name.startswith("pass")} == pytest.approx(
        {"pass@1": 0.375, "pass@2": 0.5, "pass@4": 0.75})
    assert found["rewards/exact/failed"] == 2 and found["rewards/form/mean"] == 0.5
    easier = set_metrics(completions, ["exact", "form"],
                         EvaluateConfig(num_generations=4, temperature=1.0, pass_threshold=0.5))
    assert easier["pass@1"] == pytest.approx((1 + 0.5 + 0 + 0.25) / 4)


def test_greedy_evaluation_has_no_pass_at_k(completion):
    """One completion a prompt: the mean says it all."""
    assert not any("pass" in name for name in set_metrics([completion([1], rewards=[1.0], reward=1.0)], ["exact"],
                                                          EvaluateConfig()))


def test_the_accuracy_is_the_first_sets_first_reward():
    """With one set under eval/, with several under the first one's name; None where it scored nothing."""
    assert first_accuracy({"eval/rewards/exact/mean": 0.5}, {"heldout": []}, "exact") == 0.5
    metrics = {"eval/a/rewards/exact/mean": 0.25, "eval/b/rewards/exact/mean": 0.75}
    assert first_accuracy(metrics, {"a": [], "b": []}, "exact") == 0.25
    assert first_accuracy({}, {"a": []}, "exact") is None
