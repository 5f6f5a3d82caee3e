"""The objective: token losses, and the weights that make them one number for a whole step.

loss = sum over tokens of weight * token loss. Weights come from the whole step's counts (all ranks, all
micro-batches), so the sum over any split into micro-batches and ranks is the same number.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_rl.batch import StepTotals
from spmd_rl.config import LossConfig


@dataclass
class LossInputs:
    """Tensors of the N target tokens of one micro-batch."""

    logprobs_N: Tensor
    """Policy, with gradient."""
    old_logprobs_N: Tensor
    """Policy before the update, without gradient."""
    advantages_N: Tensor
    lengths_N: Tensor
    """Completion tokens of the target's sequence."""
    ref_logprobs_N: Tensor | None = None


TokenLoss = Callable[[LossInputs, LossConfig], Tensor]
Weights = Callable[[Tensor, StepTotals, int], Tensor]


def clipped_surrogate(inputs: LossInputs, config: LossConfig) -> Tensor:
    """-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) a token; r = exp(logprobs - old_logprobs).

    Schulman et al. 2017; the two-sided range of DAPO, Yu et al. 2025.
    """
    ratio = (inputs.logprobs_N - inputs.old_logprobs_N).exp()
    low, high = clip_range(config)
    clipped = ratio.clamp(1 - low, 1 + high)
    return -torch.minimum(ratio * inputs.advantages_N, clipped * inputs.advantages_N)


def clip_range(config: LossConfig) -> tuple[float, float]:
    """(below 1, above 1)."""
    return config.epsilon, config.epsilon if config.epsilon_high is None else config.epsilon_high


def token_mean(lengths_N: Tensor, totals: StepTotals, max_length: int) -> Tensor:
    """1 / tokens of the step: each token weighs the same (DAPO)."""
    return torch.full_like(lengths_N, 1 / max(totals.tokens, 1))


def sequence_mean(lengths_N: Tensor, totals: StepTotals, max_length: int) -> Tensor:
    """1 / (tokens of its completion * completions of the step): each completion weighs the same (GRPO)."""
    return 1 / (lengths_N * max(totals.sequences, 1))


def constant_length(lengths_N: Tensor, totals: StepTotals, max_length: int) -> Tensor:
    """1 / (completions of the step * longest completion allowed), free of length bias (Dr. GRPO)."""
    return torch.full_like(lengths_N, 1 / (max(totals.sequences, 1) * max_length))


LOSSES: dict[str, tuple[TokenLoss, Weights]] = {
    "dapo": (clipped_surrogate, token_mean),
    "grpo": (clipped_surrogate, sequence_mean),
    "dr_grpo": (clipped_surrogate, constant_length),
}


def kl_k3(logprobs_N: Tensor, ref_logprobs_N: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = ref - policy: k3 estimator of KL(policy || reference), Schulman 2020."""
    difference = ref_logprobs_N - logprobs_N
    return torch.expm1(difference) - difference


def policy_loss(inputs: LossInputs, config: LossConfig, totals: StepTotals, max_length: int,
                user_loss: TokenLoss | None = None) -> Tensor:
    """This micro-batch's part of the step's loss: a scalar; the parts of all add up to the loss.

    user_loss: the token loss that stands in for a built-in one; it is weighed by token_mean.
    """
    token_loss, weigh = (user_loss, token_mean) if user_loss else LOSSES[config.loss_type]
    loss_N = token_loss(inputs, config)
    if loss_N.shape != inputs.logprobs_N.shape:
        raise ValueError(f"loss.loss_type {config.loss_type!r} returned shape {tuple(loss_N.shape)} for "
                         f"{tuple(inputs.logprobs_N.shape)} tokens: return one loss a token")
    if config.beta > 0:
        assert inputs.ref_logprobs_N is not None, "beta > 0 without reference log-probs"
        loss_N = loss_N + config.beta * kl_k3(inputs.logprobs_N, inputs.ref_logprobs_N)
    return (loss_N * weigh(inputs.lengths_N, totals, max_length)).sum()


def loss_metrics(inputs: LossInputs, config: LossConfig, entropy_N: Tensor, sampler_logprobs_N: Tensor,
                 ) -> dict[str, tuple[Tensor, int]]:
    """Sums over the micro-batch's tokens and their count, by metric name; all without gradient.

    clip_ratio/low and /high count tokens whose gradient the clip takes: ratio below the range with
    A < 0, above it with A > 0.
    """
    logprobs_N = inputs.logprobs_N.detach()
    ratio = (logprobs_N - inputs.old_logprobs_N).exp()
    low, high = clip_range(config)
    is_low = (ratio < 1 - low) & (inputs.advantages_N < 0)
    is_high = (ratio > 1 + high) & (inputs.advantages_N > 0)
    mismatch = inputs.old_logprobs_N - sampler_logprobs_N
    values = {
        "entropy": entropy_N,
        "ratio": ratio,
        "clip_ratio/low_mean": is_low.float(),
        "clip_ratio/high_mean": is_high.float(),
        "clip_ratio/region_mean": (is_low | is_high).float(),
        "sampling/sampling_logp_difference/mean": mismatch.abs(),
        "sampling/importance_sampling_ratio/mean": mismatch.exp(),
    }
    if inputs.ref_logprobs_N is not None:
        values["kl"] = kl_k3(logprobs_N, inputs.ref_logprobs_N)
    return {name: (value.sum(), value.numel()) for name, value in values.items()}
