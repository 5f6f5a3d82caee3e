"""The held-out loop: completions of every held-out prompt, greedy or several, scored by the run's rewards."""

import math
from collections.abc import Callable, Mapping, Sequence

from spmd_rl.batch import Completion, Prompt
from spmd_rl.config import EvaluateConfig
from spmd_rl.metrics import completion_metrics
from spmd_rl.rollout import STEP_EVALUATION, Sampling
from spmd_rl.step import SamplingParts, sample_and_score

KEPT = ("reward", "completions/mean_length", "completions/clipped_ratio")


def evaluate(parts: SamplingParts, sets: Mapping[str, Sequence[Prompt]],
             on_completions: Callable[[str, list[Completion]], None] = lambda name, completions: None,
             ) -> dict[str, float]:
    """Metrics of each set under eval/ (eval/NAME/ where there are several), the same on every rank and for any number
    of ranks. Collective.

    on_completions: gets each set's name and completions, in order, on every rank. The engines share the prompts, the
    ranks of an engine the scoring. The engine must be ready; nothing of
    the training state changes.
    """
    config = parts.config.evaluate
    sampling = Sampling(config.num_generations, config.max_completion_length
                        or parts.config.rollout.max_completion_length, config.temperature)
    metrics: dict[str, float] = {}
    with parts.metrics.timed("evaluate"):
        for number, (name, prompts) in enumerate(sets.items()):
            completions = sample_and_score(parts, prompts, 0, STEP_EVALUATION - number, sampling)
            on_completions(name, completions)
            prefix = "eval" if len(sets) == 1 else f"eval/{name}"
            found = set_metrics(completions, parts.rewards.names, config)
            metrics |= {f"{prefix}/{key}": value for key, value in found.items()}
    seconds = parts.metrics.reduce()["timing/evaluate"]  # here, so that the next step's times are its own
    return metrics | {"timing/evaluate": seconds}


def set_metrics(completions: Sequence[Completion], reward_names: Sequence[str],
                config: EvaluateConfig) -> dict[str, float]:
    """Means over a set's completions, and with several a prompt pass@k: a prompt's completions of which the first
    reward function reaches evaluate.pass_threshold."""
    found = completion_metrics(completions, reward_names)
    metrics = {name: value for name, value in found.items() if name in KEPT or name.startswith("rewards/")}
    if config.num_generations == 1:
        return metrics
    groups: dict[int, list[float]] = {}  # of what could be scored: a row whose answer is unreadable is in no mean
    for completion in completions:
        first = completion.rewards[0]
        if first is not None or completion.failures:
            groups.setdefault(completion.group, []).append(-math.inf if first is None else first)
    for k in powers_of_two(config.num_generations):
        values = [pass_at_k(len(group), sum(reward >= config.pass_threshold for reward in group), k)
                  for group in groups.values() if len(group) >= k]
        if values:
            metrics[f"pass@{k}"] = math.fsum(values) / len(values)
    return metrics


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`, and `most` itself."""
    return sorted({2**i for i in range(most.bit_length()) if 2**i <= most} | {most})


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that k of the samples, drawn without putting back, hold a right one: 1 - C(n - c, k) / C(n, k), the
    unbiased estimator of Chen et al. 2021."""
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def first_accuracy(metrics: Mapping[str, float], sets: Mapping[str, Sequence[Prompt]],
                   reward_name: str) -> float | None:
    """Mean of the first reward function on the first set; None where it scored no row."""
    prefix = "eval" if len(sets) == 1 else f"eval/{next(iter(sets))}"
    return metrics.get(f"{prefix}/rewards/{reward_name}/mean")
