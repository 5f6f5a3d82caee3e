"""The algorithm, on one screen: one rollout and its update."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spmd_rl.advantages import group_advantages
from spmd_rl.batch import Completion, MicroBatch, StepTotals, Tensor, pack, plan_step
from spmd_rl.config import Config
from spmd_rl.losses import LossInputs, TokenLoss, loss_metrics, policy_loss
from spmd_rl.memory import Memory
from spmd_rl.mesh import Mesh
from spmd_rl.metrics import Metrics, completion_metrics
from spmd_rl.policy import Policy, Reference
from spmd_rl.prompts import PromptSampler
from spmd_rl.rewards import Rewards
from spmd_rl.rollout import Rollout, Sampling
from spmd_rl.weight_sync import WeightSync


@dataclass
class Parts:
    """The nouns whose verbs a step calls; `job` makes them."""

    config: Config
    mesh: Mesh
    metrics: Metrics
    tokenizer: Any
    sampler: PromptSampler
    rewards: Rewards
    rollout: Rollout
    policy: Policy
    reference: Reference | None
    weight_sync: WeightSync
    memory: Memory
    user_advantages: Callable[[list[float], list[int]], Sequence[float]] | None = None
    user_loss: TokenLoss | None = None


def train_step(parts: Parts, step: int) -> dict[str, float]:
    """Step number `step` (from 0); returns its metrics, the same on every rank. Collective."""
    with parts.metrics.timed("step"):
        completions = sample(parts, step)
        parts.memory.enter("train")
        with parts.metrics.timed("learn"):
            learn(parts, completions)
        sync(parts)
    return parts.metrics.reduce()


def sample(parts: Parts, step: int) -> list[Completion]:
    """The step's completions of all ranks, in order of prompt and sample, with rewards and advantages."""
    config, mesh, metrics = parts.config, parts.mesh, parts.metrics
    prompts = parts.sampler.draw(step)
    mine = mesh.engine_share(range(len(prompts)))
    first = mine[0] if mine else 0
    with metrics.timed("rollout"):
        sampling = Sampling(config.rollout.num_generations, config.rollout.max_completion_length)
        sampled = parts.rollout.generate([prompts[i] for i in mine], first, step, sampling)
    with metrics.timed("reward"):
        scored = mesh.rank_share_of_engine(sampled)
        parts.rewards.score([prompts[c.group] for c in scored], scored)
    with metrics.timed("gather"):
        completions = mesh.gather_lists(scored)
    set_advantages(parts, completions)
    for name, value in completion_metrics(completions, parts.rewards.names).items():
        metrics.maximum(name, value)  # every rank has them all
    metrics.maximum("epoch", parts.sampler.epoch(step))
    return completions


def set_advantages(parts: Parts, completions: Sequence[Completion]) -> None:
    """From the whole step's rewards, so that no layout changes them."""
    rewards, groups = [c.reward for c in completions], [c.group for c in completions]
    if parts.user_advantages:
        advantages = parts.user_advantages(rewards, groups)
    else:
        advantages = group_advantages(rewards, groups, parts.config.advantages.scale_rewards)
    for completion, advantage in zip(completions, advantages, strict=True):
        completion.advantage = float(advantage)


def learn(parts: Parts, completions: Sequence[Completion]) -> None:
    """One optimizer step on the completions of all ranks."""
    config, mesh, metrics, policy = parts.config, parts.mesh, parts.metrics, parts.policy
    rows = mesh.mine(plan_step(completions, mesh.world_size, config.batch.max_tokens_per_microbatch))
    micro_batches = [pack(row, mesh.device, policy.row_block) for row in rows]
    totals = StepTotals.of(completions)
    if parts.reference:
        with metrics.timed("reference"):
            for mb, logprobs_N in zip(micro_batches, parts.reference.logprobs(micro_batches), strict=True):
                mb.ref_logprobs_N = logprobs_N
    if config.loss.recompute_old_logprobs:
        with metrics.timed("old_logprobs"):
            for mb, logprobs_N in zip(micro_batches, policy.logprobs(micro_batches), strict=True):
                mb.old_logprobs_N = logprobs_N

    def loss(mb: MicroBatch, logprobs_N: Tensor, entropy_N: Tensor) -> Tensor:
        old_N = logprobs_N.detach() if mb.old_logprobs_N is None else mb.old_logprobs_N
        inputs = LossInputs(logprobs_N, old_N, mb.advantages_N, mb.lengths_N, mb.ref_logprobs_N)
        part = policy_loss(inputs, config.loss, totals, config.rollout.max_completion_length, parts.user_loss)
        metrics.total("loss", part.detach())
        for name, (value, count) in loss_metrics(inputs, config.loss, entropy_N, mb.sampler_logprobs_N).items():
            metrics.mean(name, value, count)
        return part

    with metrics.timed("train"):
        policy.forward_backward(micro_batches, loss)
    with metrics.timed("optimizer"):
        result = policy.step()
    metrics.maximum("grad_norm", result.grad_norm)
    metrics.maximum("learning_rate", result.learning_rate)
    metrics.maximum("num_microbatches", len(micro_batches))


def sync(parts: Parts) -> None:
    """Bring the engine to the policy's weights, awake and ready."""
    parts.memory.enter("sync")
    with parts.metrics.timed("sync"):
        num_bytes = parts.weight_sync.sync()
    parts.metrics.maximum("perf/sync_gib", num_bytes / 2**30)
    parts.memory.enter("rollout")
