"""The held-out loop: greedy completions of every held-out prompt, scored by the run's rewards."""

from collections.abc import Sequence

from spmd_rl.batch import Prompt
from spmd_rl.metrics import completion_metrics
from spmd_rl.rollout import STEP_EVALUATION, Sampling
from spmd_rl.step import Parts, sample_and_score


def evaluate(parts: Parts, prompts: Sequence[Prompt]) -> dict[str, float]:
    """Metrics of `prompts` under eval/, the same on every rank and for any number of ranks. Collective.

    The engines share the prompts, the ranks of an engine the scoring. The engine must be ready; nothing of
    the training state changes.
    """
    with parts.metrics.timed("evaluate"):
        sampling = Sampling(1, parts.config.rollout.max_completion_length, greedy=True)
        completions = sample_and_score(parts, prompts, 0, STEP_EVALUATION, sampling)
    found = completion_metrics(completions, parts.rewards.names)
    kept = ["reward", "completions/mean_length", "completions/clipped_ratio"]
    kept += [name for name in found if name.startswith("rewards/")]
    seconds = parts.metrics.reduce()["timing/evaluate"]  # here, so that the next step's times are its own
    return {f"eval/{name}": found[name] for name in kept} | {"timing/evaluate": seconds}
