"""The objective: token losses, and the weights that make them one number for a whole step.

loss = sum over tokens of weight * token loss. Weights come from the whole step's counts (all ranks, all
micro-batches), so the sum over any split into micro-batches and ranks is the same number. All tokens of a
completion are in one micro-batch, which is what sequence-level ratios need. `docs/algorithms.md` has the
formulas, papers and where they differ from TRL's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from spmd_rl.batch import MicroBatch, StepTotals
from spmd_rl.config import LossConfig

ENTROPY_TIE = 1e-4  # far above what the layout of an fp32 row changes, far below what tells tokens apart
LOG_RATIO_CAP = 20.0  # exp(20) is 5e8: beyond it neither a ratio nor its gradient means anything, and e^89 is infinite


@dataclass
class LossInputs:
    """Tensors of the N target tokens of one micro-batch."""

    logprobs_N: Tensor
    """Policy, with gradient."""
    old_logprobs_N: Tensor
    """Policy before the update, without gradient."""
    sampler_logprobs_N: Tensor
    """The engine's, when it sampled."""
    advantages_N: Tensor
    sequence_N: Tensor
    """Which completion of the micro-batch a token belongs to, from 0."""
    lengths_N: Tensor
    """Tokens of that completion."""
    entropy_N: Tensor
    """Of the policy's distribution, with gradient."""
    old_entropy_N: Tensor | None = None
    """The same before the update."""
    ref_logprobs_N: Tensor | None = None


TokenLoss = Callable[[LossInputs, LossConfig], Tensor]
Weights = Callable[[Tensor, StepTotals, int], Tensor]
ClipMetrics = Callable[[Tensor, Tensor, LossConfig], dict[str, Tensor]]


class Loss(NamedTuple):
    """What a loss_type is made of."""

    token_loss: TokenLoss
    weigh: Weights
    clip_metrics: ClipMetrics
    """From ratio and advantages of each token to what the clip does to it."""


# Token losses: from the micro-batch's tokens to one loss a token. ----------------------------------------------------


def clipped_surrogate(inputs: LossInputs, config: LossConfig) -> Tensor:
    """-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) a token.

    Schulman et al. 2017; the two-sided range of DAPO, Yu et al. 2025. delta bounds r from above on the unclipped
    side (INTELLECT-2, 2025); dual_clip c bounds the loss of a negative advantage by c |A| (Ye et al. 2020).
    """
    ratio = importance_ratio(inputs, config)
    low, high = clip_range(config)
    advantages = inputs.advantages_N
    bounded = ratio if config.delta is None else ratio.clamp(max=config.delta)
    objective = torch.minimum(bounded * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if config.dual_clip is not None:
        floor = torch.maximum(objective, config.dual_clip * advantages)
        objective = torch.where(advantages < 0, floor, objective)
    return -objective


def cispo(inputs: LossInputs, config: LossConfig) -> Tensor:
    """-sg[min(r, epsilon_high)] A logprob: the ratio is a weight and every token keeps a gradient (MiniMax-M1, 2025).

    epsilon_high is the largest ratio itself here, as in ScaleRL (2025), and not its distance from 1.
    """
    weight = importance_ratio(inputs, config).detach().clamp(max=config.epsilon_high)
    return -weight * inputs.advantages_N * inputs.logprobs_N


def sapo(inputs: LossInputs, config: LossConfig) -> Tensor:
    """-sigmoid(t (r - 1)) 4 / t A with t by the advantage's sign: a soft gate for the clip (Gao et al. 2025)."""
    ratio = importance_ratio(inputs, config)
    is_positive = (inputs.advantages_N > 0).to(ratio.dtype)
    difference = config.sapo_temperature_pos - config.sapo_temperature_neg
    temperature = config.sapo_temperature_neg + is_positive * difference
    return -torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * inputs.advantages_N


def clip_range(config: LossConfig) -> tuple[float, float]:
    """(below 1, above 1)."""
    return config.epsilon, config.epsilon if config.epsilon_high is None else config.epsilon_high


def importance_ratio(inputs: LossInputs, config: LossConfig) -> Tensor:
    """Policy over old policy, a value a token.

    "token": exp(logprob - old). "sequence": exp of the completion's mean of that, for all of its tokens (GSPO,
    Zheng et al. 2025). "sequence_token": that value, with each token's own gradient (GSPO-token).
    """
    log_ratio = inputs.logprobs_N - inputs.old_logprobs_N
    if config.importance_sampling_level != "token":
        mean = sequence_sum(log_ratio, inputs.sequence_N) / inputs.lengths_N
        if config.importance_sampling_level == "sequence_token":
            mean = mean.detach() + inputs.logprobs_N - inputs.logprobs_N.detach()
        log_ratio = mean
    return log_ratio.clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP).exp()


def sequence_sum(values_N: Tensor, sequence_N: Tensor) -> Tensor:
    """Each token gets the sum over its completion."""
    # N sums are enough for any number of completions: their true number would be read from the device.
    return torch.zeros_like(values_N).index_add(0, sequence_N, values_N)[sequence_N]


# Weights: what one token counts in the step's loss. ------------------------------------------------------------------


def token_mean(lengths_N: Tensor, totals: StepTotals, max_length: int) -> Tensor:
    """1 / tokens of the step: each token weighs the same (DAPO)."""
    return torch.full_like(lengths_N, 1 / max(totals.tokens, 1))


def sequence_mean(lengths_N: Tensor, totals: StepTotals, max_length: int) -> Tensor:
    """1 / (tokens of its completion * completions of the step): each completion weighs the same (GRPO)."""
    return 1 / (lengths_N * max(totals.sequences, 1))


def constant_length(lengths_N: Tensor, totals: StepTotals, max_length: int) -> Tensor:
    """1 / (completions of the step * longest completion allowed), free of length bias (Dr. GRPO)."""
    return torch.full_like(lengths_N, 1 / (max(totals.sequences, 1) * max_length))


# What the clip does. -------------------------------------------------------------------------------------------------


def clipped_tokens(ratio_N: Tensor, advantages_N: Tensor, config: LossConfig) -> dict[str, Tensor]:
    """Tokens whose gradient the clip takes: ratio below the range with A < 0, above it with A > 0."""
    low, high = clip_range(config)
    is_low = (ratio_N < 1 - low) & (advantages_N < 0)
    is_high = (ratio_N > 1 + high) & (advantages_N > 0)
    return {"clip_ratio/low_mean": is_low.float(), "clip_ratio/high_mean": is_high.float(),
            "clip_ratio/region_mean": (is_low | is_high).float()}


def capped_weights(ratio_N: Tensor, advantages_N: Tensor, config: LossConfig) -> dict[str, Tensor]:
    """Tokens whose weight cispo bounds, with A > 0 as TRL counts them."""
    _, high = clip_range(config)
    return {"cispo_clip_ratio": ((ratio_N > high) & (advantages_N > 0)).float()}


def no_clip(ratio_N: Tensor, advantages_N: Tensor, config: LossConfig) -> dict[str, Tensor]:
    """A loss without one."""
    return {}


LOSSES = {
    "dapo": Loss(clipped_surrogate, token_mean, clipped_tokens),
    "grpo": Loss(clipped_surrogate, sequence_mean, clipped_tokens),
    "dr_grpo": Loss(clipped_surrogate, constant_length, clipped_tokens),
    "cispo": Loss(cispo, token_mean, capped_weights),
    "sapo": Loss(sapo, sequence_mean, no_clip),
}


# KL to the reference. ------------------------------------------------------------------------------------------------


def kl_estimate(logprobs_N: Tensor, ref_logprobs_N: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(policy || reference) a token, from tokens of the policy; d = policy - reference (Schulman 2020).

    k1 = d: unbiased, any sign; its gradient's mean is 0, so as a loss it teaches nothing. k2 = d^2 / 2: its
    gradient's mean is that of the reverse KL. k3 = exp(-d) - 1 + d: unbiased, never negative; its gradient's mean is
    that of the forward KL. d is capped, so that neither value nor gradient overflows.
    """
    difference = (logprobs_N - ref_logprobs_N).clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return torch.expm1(-difference) + difference


# The sampler's mismatch. ---------------------------------------------------------------------------------------------


def sampler_weights(inputs: LossInputs, config: LossConfig) -> Tensor:
    """Importance weight of each token between the policy and the sampler that drew it, without gradient.

    exp(old - sampler), a token or a whole completion, truncated to the bounds or 0 beyond them, as in TRL.
    """
    difference = inputs.old_logprobs_N - inputs.sampler_logprobs_N
    level, how = config.importance_sampling_mode.split("_")
    if level == "sequence":
        difference = sequence_sum(difference, inputs.sequence_N)
    ratio = difference.detach().clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP).exp()
    low = 0.0 if config.importance_sampling_clip_min is None else config.importance_sampling_clip_min
    high = float("inf") if config.importance_sampling_clip_max is None else config.importance_sampling_clip_max
    if how == "truncate":
        return ratio.clamp(low, high)
    return torch.where((ratio < low) | (ratio > high), torch.zeros_like(ratio), ratio)


# All together. -------------------------------------------------------------------------------------------------------


def loss_of(config: LossConfig, user_loss: TokenLoss | None = None) -> Loss:
    """The config's loss; the user's own has dapo's weights, and the metrics of the clip that it may have."""
    found = LOSSES.get(config.loss_type, LOSSES["dapo"])
    return found._replace(token_loss=user_loss) if user_loss else found


def policy_loss(inputs: LossInputs, config: LossConfig, totals: StepTotals, max_length: int,
                user_loss: TokenLoss | None = None, entropy_threshold: float | None = None) -> Tensor:
    """This micro-batch's part of the step's loss: a scalar; the parts of all add up to the loss.

    user_loss: the token loss that stands in for a built-in one; it is weighed by token_mean. entropy_threshold: tokens
    of a lower entropy are left out of the token loss and the entropy bonus; the KL keeps them, and so do the weights.
    """
    loss_type = loss_of(config, user_loss)
    weights_N = loss_type.weigh(inputs.lengths_N, totals, max_length)
    loss_N = loss_type.token_loss(inputs, config)
    if loss_N.shape != inputs.logprobs_N.shape:
        raise ValueError(f"loss.loss_type {config.loss_type!r} returned shape {tuple(loss_N.shape)} for "
                         f"{tuple(inputs.logprobs_N.shape)} tokens: return one loss a token")
    if config.importance_sampling_correction:
        loss_N = loss_N * sampler_weights(inputs, config)
    part_N = loss_N * weights_N
    if config.entropy_coef:
        # A mean over the step's tokens for every loss type, so that the coefficient means the same.
        part_N = part_N - config.entropy_coef * inputs.entropy_N * token_mean(inputs.lengths_N, totals, max_length)
    if entropy_threshold is not None:
        assert inputs.old_entropy_N is not None, "an entropy threshold without entropies"
        # Left out, not multiplied by 0; and not indexed, since how many are left would be read from the device.
        part_N = torch.where(inputs.old_entropy_N >= entropy_threshold, part_N, 0.0)
    part = part_N.sum()
    if config.beta > 0 and config.kl_in == "loss":
        assert inputs.ref_logprobs_N is not None, "beta > 0 without reference log-probs"
        kl_N = kl_estimate(inputs.logprobs_N, inputs.ref_logprobs_N, config.kl_estimator)
        if config.use_bias_correction_kl:
            kl_N = kl_N * importance_ratio(inputs, config)
        part = part + config.beta * (kl_N * weights_N).sum()
    return part


def loss_metrics(inputs: LossInputs, config: LossConfig) -> dict[str, tuple[Tensor, int]]:
    """Sums over the micro-batch's tokens and their count, by metric name; all without gradient."""
    inputs = replace(inputs, logprobs_N=inputs.logprobs_N.detach(), entropy_N=inputs.entropy_N.detach())
    ratio = importance_ratio(inputs, config)
    mismatch = inputs.old_logprobs_N - inputs.sampler_logprobs_N
    capped = mismatch.clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP)
    values = {
        "entropy": inputs.entropy_N,
        "ratio": ratio,
        "sampling/sampling_logp_difference/mean": mismatch.abs(),
        "sampling/importance_sampling_ratio/mean": capped.exp(),
        "sampling/kl": torch.expm1(capped) - capped,  # k3 of KL(sampler || policy): tokens are the sampler's
    } | loss_of(config).clip_metrics(ratio, inputs.advantages_N, config)
    if config.importance_sampling_correction:
        weights = sampler_weights(inputs, config)
        values["sampling/importance_sampling_weight/mean"] = weights
        values["sampling/masked_fraction"] = (weights == 0).float()
    if inputs.ref_logprobs_N is not None:
        values["kl"] = kl_estimate(inputs.logprobs_N, inputs.ref_logprobs_N, config.kl_estimator)
    return {name: (value.sum(), value.numel()) for name, value in values.items()}


# Over the rows of a rank, before the first update. -------------------------------------------------------------------


def completion_kl(mb: MicroBatch, estimator: str) -> dict[tuple[int, int], float]:
    """(group, sample) -> sum over the completion's tokens of the KL estimate between old policy and reference."""
    if not mb.num_targets:
        return {}
    assert mb.old_logprobs_N is not None and mb.ref_logprobs_N is not None, "a KL before its log-probs"
    kl_N = kl_estimate(mb.old_logprobs_N, mb.ref_logprobs_N, estimator).double()
    sums = kl_N.new_zeros(len(mb.completions)).index_add(0, mb.sequence_N, kl_N).tolist()
    return {(c.group, c.sample): value for c, value in zip(mb.completions, sums, strict=True)}


def old_entropies(rows: Sequence[MicroBatch]) -> list[float]:
    """Entropies of the rows' tokens before the update."""
    return [value for mb in rows if mb.old_entropy_N is not None for value in mb.old_entropy_N.tolist()]


def lowest_of_top(entropies: Sequence[float], share: float) -> float:
    """Entropy from which on a token is among the `share` of highest entropy; the same for any order of `entropies`.

    The first tokens of a group have one distribution, and rounding alone tells their entropies apart: all that are
    within ENTROPY_TIE of the quantile stay.
    """
    return quantile(entropies, 1 - share) - ENTROPY_TIE


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie, linear between neighbours; the same for any order of `values`."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
