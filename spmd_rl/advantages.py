"""From rewards to advantages. Pure functions over a whole step's rewards."""

from collections import defaultdict
from collections.abc import Sequence

STD_EPSILON = 1e-4  # TRL's: a group whose rewards are all equal has advantage 0, not 0/0


def group_advantages(rewards: Sequence[float], groups: Sequence[int], scale: str = "group",
                     epsilon: float = STD_EPSILON) -> list[float]:
    """Reward less the mean of its group, over the group's sample standard deviation (GRPO, Shao et al. 2024).

    rewards, groups: a value a completion, in any order; a group is its id, never its place or its text.
    scale: "group" divides by (sample std + epsilon), "none" does not (Dr. GRPO, Liu et al. 2025).
    """
    members: dict[int, list[float]] = defaultdict(list)
    for reward, group in zip(rewards, groups, strict=True):
        members[group].append(reward)
    mean = {g: sum(values) / len(values) for g, values in members.items()}
    centred = [reward - mean[group] for reward, group in zip(rewards, groups, strict=True)]
    if scale == "none":
        return centred
    deviation = {g: _sample_std(values, mean[g]) for g, values in members.items()}
    return [c / (deviation[g] + epsilon) if deviation[g] else 0.0 for c, g in zip(centred, groups, strict=True)]


def group_spread(rewards: Sequence[float], groups: Sequence[int]) -> tuple[list[float], int]:
    """(sample std of each group, number of groups whose rewards are all equal)."""
    members: dict[int, list[float]] = defaultdict(list)
    for reward, group in zip(rewards, groups, strict=True):
        members[group].append(reward)
    deviations = [_sample_std(v, sum(v) / len(v)) for v in members.values()]
    return deviations, sum(d == 0 for d in deviations)


def _sample_std(values: Sequence[float], mean: float) -> float:
    if len(values) < 2 or all(v == values[0] for v in values):
        return 0.0
    return (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5
