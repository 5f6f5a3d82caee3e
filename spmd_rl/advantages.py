"""From rewards to advantages. Pure functions over a whole step's rewards, so that no layout changes them.

A reward of None was scored by no function: it stands in no mean and no deviation, and its advantage is 0.
"""

from collections import defaultdict
from collections.abc import Sequence

STD_EPSILON = 1e-4  # TRL's: a group whose rewards are all equal has advantage 0, not 0/0


def group_advantages(rewards: Sequence[float | None], groups: Sequence[int], scale: str = "group",
                     baseline: str = "mean", epsilon: float = STD_EPSILON) -> list[float]:
    """Reward less its group's baseline, scaled.

    rewards, groups: a value a completion, in any order; a group is its id, never its place or its text, and may have
    any size. baseline: "mean" of the group (GRPO, Shao et al. 2024), or "leave_one_out", the mean of the others (RLOO,
    Ahmadian et al. 2024). scale: by (sample std + epsilon) of the "group"'s rewards or the "batch"'s; "whiten"
    brings the whole batch's differences to mean 0 and std 1 (REINFORCE++ with baseline, Hu et al. 2025); "none" does
    not (Dr. GRPO, Liu et al. 2025).
    """
    members = _members(rewards, groups)
    centred = [_centre(r, members[g], baseline) if r is not None else None
               for r, g in zip(rewards, groups, strict=True)]
    if scale == "none":
        return [c or 0.0 for c in centred]
    if scale == "group":
        deviation = {g: sample_std(values) for g, values in members.items()}
        return [_over(c, deviation.get(g, 0.0), epsilon) for c, g in zip(centred, groups, strict=True)]
    if scale == "batch":
        std = sample_std([r for r in rewards if r is not None])
        return [_over(c, std, epsilon) for c in centred]
    known = [c for c in centred if c is not None]
    mean, std = _mean(known), sample_std(known)
    return [_over(None if c is None else c - mean, std, epsilon) for c in centred]


def normalize_then_sum(scores: Sequence[Sequence[float | None]], weights: Sequence[float], groups: Sequence[int],
                       epsilon: float = STD_EPSILON) -> list[float]:
    """Each reward function's scores normalised within their groups, then weighed, summed, and whitened over the batch.

    scores[i][f]: of completion i by function f (GDPO, 2026; TRL's multi_objective_aggregation).
    """
    scored = [any(s is not None for s in row) for row in scores]
    sums = [0.0] * len(scores)
    for f, weight in enumerate(weights):
        column = [row[f] for row in scores]
        for i, advantage in enumerate(group_advantages(column, groups, "group", epsilon=epsilon)):
            sums[i] += weight * advantage
    known = [s for s, is_scored in zip(sums, scored, strict=True) if is_scored]
    mean, std = _mean(known), sample_std(known)
    return [_over(s - mean, std, epsilon) if is_scored else 0.0 for s, is_scored in zip(sums, scored, strict=True)]


def group_spread(rewards: Sequence[float | None], groups: Sequence[int]) -> dict[int, float]:
    """Sample std of each group's rewards; 0 for a flat group, which teaches nothing."""
    members = _members(rewards, groups)
    return {g: sample_std(members.get(g, [])) for g in dict.fromkeys(groups)}


def sample_std(values: Sequence[float]) -> float:
    """Over n - 1; exactly 0 where all are equal, or where there are fewer than two."""
    if len(values) < 2 or all(v == values[0] for v in values):
        return 0.0
    mean = _mean(values)
    return (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5


def _members(rewards: Sequence[float | None], groups: Sequence[int]) -> dict[int, list[float]]:
    members: dict[int, list[float]] = defaultdict(list)
    for reward, group in zip(rewards, groups, strict=True):
        if reward is not None:
            members[group].append(reward)
    return members


def _centre(reward: float, group: Sequence[float], baseline: str) -> float:
    if all(r == group[0] for r in group):
        return 0.0  # a mean of equal numbers may differ from them in the last bit
    if baseline == "leave_one_out":
        return reward - (sum(group) - reward) / (len(group) - 1)
    return reward - _mean(group)


def _over(value: float | None, deviation: float, epsilon: float) -> float:
    return value / (deviation + epsilon) if value is not None and deviation else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
