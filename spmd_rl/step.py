"""The algorithm, on one screen: one rollout and its update."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spmd_rl.advantages import group_advantages, group_spread, normalize_then_sum
from spmd_rl.attention import num_compilations
from spmd_rl.batch import (Completion, MicroBatch, Prompt, Row, StepTotals, minibatches, pack, plan_step, work,
                           work_of_copies)
from spmd_rl.config import Config
from spmd_rl.losses import (LossInputs, TokenLoss, completion_kl, loss_metrics, lowest_of_top, old_entropies,
                            policy_loss)
from spmd_rl.memory import Memory
from spmd_rl.mesh import Mesh
from spmd_rl.metrics import Metrics, completion_metrics, with_throughput
from spmd_rl.offload import Tenant
from spmd_rl.policy import Policy, Reference
from spmd_rl.prompts import PromptSampler
from spmd_rl.recording import Recorder
from spmd_rl.reward_functions import check_result
from spmd_rl.rewards import Rewards
from spmd_rl.rollout import Rollout, Sampling
from spmd_rl.weight_sync import WeightSync


@dataclass
class SamplingParts:
    """What sampling and scoring need: also without a policy."""

    config: Config
    mesh: Mesh
    metrics: Metrics
    rewards: Rewards
    rollout: Rollout


@dataclass
class Parts(SamplingParts):
    """The nouns whose verbs a step calls; `job` makes them."""

    tokenizer: Any
    sampler: PromptSampler
    policy: Policy
    reference: Reference | None
    weight_sync: WeightSync
    memory: Memory
    user_advantages: Callable[[list[float | None], list[int]], Sequence[float]] | None = None
    user_loss: TokenLoss | None = None
    recorders: Sequence[Recorder] = ()
    """One on one rank where rollouts are kept."""


def train_step(parts: Parts, step: int) -> dict[str, float]:
    """Step number `step` (from 0); returns its metrics, the same on every rank. Collective."""
    with parts.metrics.timed("step"):
        completions = sample(parts, step)
        for recorder in parts.recorders:
            recorder.write(step, completions)
        with parts.metrics.timed("learn"):
            learn(parts, completions)
        refresh_reference(parts, step)
        sync(parts)
    return _metrics_of(parts)


def replay_step(parts: Parts, completions: list[Completion], step: int) -> dict[str, float]:
    """The learning half of a step on completions that were recorded; returns its metrics. Collective."""
    with parts.metrics.timed("step"), parts.metrics.timed("learn"):
        learn(parts, completions)
        refresh_reference(parts, step)
    return _metrics_of(parts)


def _metrics_of(parts: Parts) -> dict[str, float]:
    parts.metrics.add_system()
    return with_throughput(parts.metrics.reduce(), parts.mesh.world_size, parts.policy.peak_tflops)


def sample(parts: Parts, step: int) -> list[Completion]:
    """The step's completions of all ranks, in order of prompt and sample, with rewards and advantages."""
    config, metrics = parts.config, parts.metrics
    completions = sample_prompts(parts, parts.sampler.draw(step), 0, step)
    for round_ in range(1, config.rollout.resample_rounds + 1):
        # Every rank has all rewards, so all decide alike.
        kept = with_spread(completions)
        num_missing = config.batch.prompts_per_step - len({c.group for c in kept})
        if not num_missing:
            break
        prompts = parts.sampler.draw_again(step, round_, num_missing)
        completions = kept + sample_prompts(parts, prompts, round_ * config.batch.prompts_per_step, step)
        metrics.maximum("resampling/rounds", round_)
    if config.rollout.resample_rounds:
        completions = with_spread(completions) or completions  # only flat groups: a step without gradient
    set_advantages(parts, completions)
    for completion in completions:
        completion.is_trained = not (config.loss.mask_truncated_completions and completion.finish_reason == "length")
    for name, value in completion_metrics(completions, parts.rewards.names).items():
        metrics.maximum(name, value)  # every rank has them all
    metrics.maximum("epoch", parts.sampler.epoch(step))
    metrics.samples(step + 1, completions, parts.tokenizer, parts.rewards.names)
    return completions


def sample_prompts(parts: Parts, prompts: Sequence[Prompt], first_group: int, step: int) -> list[Completion]:
    """Completions of all ranks for these prompts, scored; groups count from `first_group`. Collective."""
    config = parts.config
    parts.weight_sync.check_current()
    sampling = Sampling(config.rollout.num_generations, config.rollout.max_completion_length)
    return sample_and_score(parts, prompts, first_group, step, sampling)


def sample_and_score(parts: SamplingParts, prompts: Sequence[Prompt], first_group: int, step: int,
                     sampling: Sampling) -> list[Completion]:
    """Completions of all ranks with rewards; each is scored as it ends, by one of its engine's ranks. Collective."""
    mesh, metrics = parts.mesh, parts.metrics
    mine = mesh.engine_share(range(len(prompts)))
    first = first_group + (mine[0] if mine else 0)
    to_score = mesh.rank_share_of_engine(range(len(mine) * sampling.num_generations))

    def submit(place: int, completion: Completion) -> None:
        if place in to_score:
            parts.rewards.submit(prompts[completion.group - first_group], completion)

    with metrics.timed("rollout"):
        sampled = parts.rollout.generate([prompts[i] for i in mine], first, step, sampling, submit)
    with metrics.timed("reward"):
        parts.rewards.collect()
    with metrics.timed("gather"):
        return mesh.gather_lists(mesh.rank_share_of_engine(sampled))


def with_spread(completions: Sequence[Completion]) -> list[Completion]:
    """Those of groups whose rewards differ."""
    spread = group_spread([c.reward for c in completions], [c.group for c in completions])
    return [c for c in completions if spread[c.group] > 0]


def set_advantages(parts: Parts, completions: Sequence[Completion]) -> None:
    """From the whole step's rewards, so that no layout changes them."""
    config = parts.config.advantages
    rewards, groups = [c.reward for c in completions], [c.group for c in completions]
    advantages: Sequence[float | None]
    if parts.user_advantages:
        advantages = check_result(f"advantages.function {config.function}", parts.user_advantages(rewards, groups),
                                  len(completions))
    elif config.multi_objective_aggregation == "normalize_then_sum":
        advantages = normalize_then_sum([c.rewards for c in completions], parts.rewards.weights, groups)
    else:
        advantages = group_advantages(rewards, groups, config.scale_rewards, config.baseline)
    for completion, advantage in zip(completions, advantages, strict=True):
        completion.advantage = advantage or 0.0


def learn(parts: Parts, completions: Sequence[Completion]) -> None:
    """The rollout's optimizer steps: num_minibatches of them, num_iterations times."""
    config, mesh, metrics = parts.config, parts.mesh, parts.metrics
    updates = []
    for part in minibatches(completions, config.batch.num_minibatches):
        plan = plan_step(part, mesh.world_size, config.batch.max_tokens_per_microbatch, config.batch.shared_prompt,
                         parts.policy.shape)
        report_plan(parts, plan)
        rows = [pack(row, mesh.device, parts.policy.row_block) for row in mesh.mine(plan)]
        updates.append((rows, StepTotals.of(part)))
    all_rows = [mb for rows, _ in updates for mb in rows]
    compiled = num_compilations()
    score_by_reference(parts, all_rows)
    parts.memory.enter("train")
    score_by_policy(parts, all_rows)
    if config.loss.beta > 0 and config.loss.kl_in == "reward":
        take_kl_off(parts, completions, all_rows)
    threshold = entropy_threshold(parts, all_rows)
    num_skipped = 0
    for _ in range(config.loss.num_iterations):
        for rows, totals in updates:
            num_skipped += not update(parts, rows, totals, threshold)
    parts.policy.drop_second_shards()  # an optimizer step does, where one was applied
    metrics.maximum("optimizer/skipped_steps", num_skipped)
    metrics.maximum("perf/num_microbatches", len(all_rows))
    metrics.maximum("perf/compilations", num_compilations() - compiled)


def report_plan(parts: Parts, plan: Sequence[Sequence[Row]]) -> None:
    """Operations that a part's passes execute, those that copies of the prompts need, and how even the ranks are."""
    policy, metrics, passes = parts.policy, parts.metrics, parts.config.loss.num_iterations
    executed = [work(rows, policy.shape).training(policy.recomputed) for rows in plan]
    useful = work_of_copies(parts.mesh.mine(plan), policy.shape).useful
    metrics.total("perf/train_executed_tflop", passes * parts.mesh.mine(executed) / 1e12)
    metrics.total("perf/train_perceived_tflop", passes * useful / 1e12)
    if any(executed):
        metrics.maximum("perf/load_max_over_mean", max(executed) * len(executed) / sum(executed))


def score_by_reference(parts: Parts, rows: Sequence[MicroBatch]) -> None:
    """The reference's log-probs, where the loss needs them."""
    if parts.reference:
        parts.memory.enter("reference")
        with parts.metrics.timed("reference"):
            for mb, (logprobs_N, _) in zip(rows, parts.reference.score(rows), strict=True):
                mb.ref_logprobs_N = logprobs_N


def score_by_policy(parts: Parts, rows: Sequence[MicroBatch]) -> None:
    """The policy's log-probs before the update, where the current ones will not do."""
    if parts.config.needs_old_logprobs:
        with parts.metrics.timed("old_logprobs"):
            for mb, (logprobs_N, entropy_N) in zip(rows, parts.policy.score(rows), strict=True):
                mb.old_logprobs_N, mb.old_entropy_N = logprobs_N, entropy_N


def update(parts: Parts, rows: Sequence[MicroBatch], totals: StepTotals, threshold: float | None) -> bool:
    """One optimizer step on the rows of all ranks; none where none has a trained token: momentum alone would move.

    False where its gradient was not finite, and skipped.
    """
    config, metrics = parts.config, parts.metrics
    if not totals.tokens:
        return True

    def loss(mb, logprobs_N, entropy_N):
        old_N = logprobs_N.detach() if mb.old_logprobs_N is None else mb.old_logprobs_N
        inputs = LossInputs(logprobs_N, old_N, mb.sampler_logprobs_N, mb.advantages_N, mb.sequence_N, mb.lengths_N,
                            entropy_N, mb.old_entropy_N, mb.ref_logprobs_N)
        part = policy_loss(inputs, config.loss, totals, config.rollout.max_completion_length, parts.user_loss,
                           threshold)
        metrics.total("loss", part.detach() / config.updates_per_step)
        for name, (value, count) in loss_metrics(inputs, config.loss).items():
            metrics.mean(name, value, count)
        return part

    with metrics.timed("train"):
        parts.policy.forward_backward(rows, loss)
    parts.memory.wait_for_step()
    with metrics.timed("optimizer"):
        result = parts.policy.step()
    metrics.maximum("grad_norm", result.grad_norm)
    metrics.maximum("learning_rate", result.learning_rate)
    return result.is_applied


def take_kl_off(parts: Parts, completions: Sequence[Completion], rows: Sequence[MicroBatch]) -> None:
    """Reward less beta times the completion's summed KL estimate, and the advantages anew. Collective."""
    loss = parts.config.loss
    mine = {key: value for mb in rows for key, value in completion_kl(mb, loss.kl_estimator).items()}
    total = {key: value for part in parts.mesh.all_gather(mine) for key, value in part.items()}
    for completion in completions:
        if completion.reward is not None:
            completion.reward -= loss.beta * total.get((completion.group, completion.sample), 0.0)
    set_advantages(parts, completions)
    for mb in rows:
        mb.take_advantages()


def entropy_threshold(parts: Parts, rows: Sequence[MicroBatch]) -> float | None:
    """Entropy above which a token stands in the loss, over all ranks' tokens; None where all do. Collective then."""
    share = parts.config.loss.top_entropy_quantile
    if share == 1:
        return None
    entropies = parts.mesh.gather_lists(old_entropies(rows))
    return lowest_of_top(entropies, share) if entropies else None


def refresh_reference(parts: Parts, step: int) -> None:
    """Move the reference towards the policy where this step ends a period."""
    loss = parts.config.loss
    if parts.reference and loss.ref_model_sync_steps and (step + 1) % loss.ref_model_sync_steps == 0:
        with parts.memory.holding([Tenant.REFERENCE]):
            parts.reference.move_towards(parts.policy, loss.ref_model_mixup_alpha)


def sync(parts: Parts) -> None:
    """Bring the engine to the policy's weights, awake and ready."""
    parts.memory.enter("sync")
    with parts.metrics.timed("sync"):
        num_bytes = parts.weight_sync.sync()
    parts.metrics.maximum("perf/sync_gib", num_bytes / 2**30)
    parts.memory.enter("rollout")


def sync_again(parts: Parts) -> None:
    """The same version once more, where the engine had to make room for a checkpoint."""
    if not parts.rollout.is_ready:
        parts.weight_sync.version -= 1
        sync(parts)
