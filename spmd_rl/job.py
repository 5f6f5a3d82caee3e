"""Builds a run's parts from its config, in the order that start-up needs, and shuts them down."""

import gc
import os
import sys
from dataclasses import dataclass
from typing import Any

from spmd_rl import checkpoint as checkpoint_module
from spmd_rl import checks
from spmd_rl import run_folder
from spmd_rl.checkpoint import Progress, Saver
from spmd_rl.config import Config, ConfigError, as_dict, load_function
from spmd_rl.memory import MOVABLE, Memory, away, claim_workspaces
from spmd_rl.mesh import Mesh, say_once
from spmd_rl.metrics import Metrics
from spmd_rl.model import load_hf_config, on_meta, shape, weight_files
from spmd_rl.offload import HostMemory, Storages, Tenant
from spmd_rl.plan import Plan, make_plan
from spmd_rl.policy import Policy, Reference
from spmd_rl.profiling import Profiler
from spmd_rl.prompts import PromptSampler, PromptSet, load_prompts, load_tokenizer
from spmd_rl.recording import Recorder
from spmd_rl.rewards import Rewards
from spmd_rl.rollout import Rollout
from spmd_rl.sinks import make_sinks
from spmd_rl.step import Parts, sync
from spmd_rl.weight_sync import WeightSync


@dataclass
class Inputs:
    """What a run needs besides weights: loaded and checked before any engine starts."""

    hf_config: Any
    tokenizer: Any
    train_prompts: PromptSet
    eval_prompts: dict[str, PromptSet]
    """By the names that metrics have."""
    rewards: Rewards
    user_advantages: Any
    user_loss: Any


def load_inputs(config: Config, world_size: int) -> Inputs:
    """Check everything that needs no weights. Raises ConfigError."""
    checks.validate(config, world_size)
    hf_config = load_hf_config(config.model)
    longest = getattr(hf_config, "max_position_embeddings", None)
    if longest is not None and config.max_model_len > longest:
        raise ConfigError(f"data.max_prompt_length + rollout.max_completion_length is {config.max_model_len}: "
                          f"the model takes {longest} tokens; lower one of them")
    weight_files(config.model.path)
    rewards = Rewards(config.rewards, config.rollout.max_completion_length)
    tokenizer = load_tokenizer(config.model)
    train_prompts = load_prompts(config.train_sets, tokenizer, config.data, "train", rewards.check_row)
    eval_prompts = load_eval_prompts(config, tokenizer, rewards)
    loss, advantages = config.loss.loss_type, config.advantages.function
    return Inputs(hf_config, tokenizer, train_prompts, eval_prompts, rewards,
                  load_function(advantages, "advantages.function") if advantages else None,
                  load_function(loss, "loss.loss_type") if ":" in loss else None)


def load_eval_prompts(config: Config, tokenizer: Any, rewards: Rewards) -> dict[str, PromptSet]:
    """Each held-out set by the last part of its path, or by its whole path where two share that."""
    paths = config.eval_sets
    short = [os.path.splitext(os.path.basename(path.rstrip("/")))[0] for path in paths]
    names = short if len(set(short)) == len(short) else paths
    return {name: load_prompts([path], tokenizer, config.data, "test", rewards.check_row, "data.eval")
            for name, path in zip(names, paths, strict=True)}


def arithmetic(config: Config, inputs: Inputs, world_size: int) -> str:
    """The batch in numbers, for --dry_run and the start of a run."""
    r, prompts = config.rollout, config.batch.prompts_per_step
    engines = world_size // r.tensor_parallel_size
    completions = prompts * r.num_generations
    lines = [
        f"{world_size} ranks: {engines} engines of {r.tensor_parallel_size}, ZeRO {config.policy.zero_stage}, "
        f"{config.model.dtype}",
        f"a step: {prompts} prompts x {r.num_generations} = {completions} completions; {prompts // engines} prompts an "
        f"engine, {completions / world_size:g} sequences a rank, {_steps(config.updates_per_step)}",
        f"a sequence: at most {config.data.max_prompt_length} + {r.max_completion_length} = {config.max_model_len} "
        f"tokens; rows of {config.batch.max_tokens_per_microbatch} tokens",
        f"the run: {config.run.max_steps} steps = {_steps(config.run.max_steps * config.updates_per_step)}, "
        f"{config.run.max_steps * prompts / len(inputs.train_prompts):.3g} epochs of "
        f"{len(inputs.train_prompts)} prompts; {sum(map(len, inputs.eval_prompts.values()))} held out",
    ]
    different = checks.sampler_differences(config)
    if different:
        lines.append(f"the sampler is not the policy with {', '.join(different)}: a warning after the first step says "
                     "by how much")
    for prompts_of in (inputs.train_prompts, *inputs.eval_prompts.values()):
        lines += left_out(prompts_of, config.data.max_prompt_length)
    return "\n".join(lines)


def memory_plan(config: Config, inputs: Inputs, world_size: int, device_bytes: int | None) -> Plan:
    """Who is on a device of so many bytes in which phase. Raises ConfigError where a phase cannot fit."""
    if config.memory.device_gib:
        device_bytes = int(config.memory.device_gib * 2**30)
    return make_plan(config, shape(on_meta(config.model, inputs.hf_config)), world_size, device_bytes)


def left_out(prompts: PromptSet, max_prompt_length: int) -> list[str]:
    """What was not taken of a data set, a line each."""
    lines = [f"{source}: {len(rows)} rows dropped, longer than data.max_prompt_length {max_prompt_length}: "
             f"rows {', '.join(map(str, rows[:10]))}{' …' * (len(rows) > 10)}"
             for source, rows in prompts.too_long.items()]
    lines += [f"{source}: {count} bad rows skipped" for source, count in prompts.bad.items()]
    return lines + [f"  {reason}" for reason in prompts.reasons]


def _steps(count: int) -> str:
    return f"{count} optimizer step{'s' * (count != 1)}"


def storages(policy: Policy, reference: Reference | None) -> Storages:
    """What of both can leave a device."""
    return {**policy.storages(), **(reference.storages() if reference else {})}


class Job:
    """A run's parts, alive."""

    def __init__(self, config: Config, mesh: Mesh, inputs: Inputs, plan: Plan, checkpoint: str | None = None) -> None:
        """Start the engines; collective. The engine comes first and sleeps, then the policy (and the reference)
        take their memory, then the first sync fills the engine. One that shares the policy's weights comes after them.

        checkpoint: the one to go on from; its weights are in the policy before the engine gets any.
        """
        self.config, self.mesh, self.inputs = config, mesh, inputs
        steps_done = run_folder.read_state(checkpoint)["step"] if checkpoint else 0
        sinks = mesh.on_main(lambda: make_sinks(config.metrics, run_folder.open_folder(config, checkpoint),
                                                config.run.max_steps, steps_done, as_dict(config)))
        metrics = Metrics(mesh, sinks, config.metrics)
        self.profiler = Profiler(config.run.profile_steps, config.run.output_dir,
                                 mesh.mine([f"rank-{number}" for number in range(mesh.world_size)]),
                                 mesh.device.type == "cuda")
        host_memory = HostMemory(pinned=mesh.device.type == "cuda")
        host_memory.grow_in_background(plan.host_bytes)  # while the engine starts
        claim_workspaces(mesh.device)
        if not plan.shares_weights:
            with metrics.timed("engine start"):
                rollout = Rollout(config, mesh, inputs.tokenizer, plan.engine_sleeps)
        with metrics.timed("policy start"):
            policy = Policy(config, mesh, inputs.hf_config, plan.shares_weights)
            # Its own copy of the config: each engine sets fields of it.
            reference = Reference(config, mesh, load_hf_config(config.model)) if config.loss.beta > 0 else None
        self.progress = checkpoint_module.load(checkpoint, policy, reference) if checkpoint else Progress()
        if plan.shares_weights:
            with metrics.timed("engine start"), away(
                    mesh.device, host_memory, lambda: storages(policy, reference), set(MOVABLE) - plan.residents):
                rollout = Rollout(config, mesh, inputs.tokenizer, plan.engine_sleeps, shared=policy.held_weights())
            if rollout.why_not_shared:
                say_once(f"warning: the engine has weights of its own, of {plan.tenants[Tenant.WEIGHTS] / 2**30:.1f} "
                         f"GiB, for which the plan has no room but the KV cache's ({rollout.why_not_shared}): set "
                         "weight_sync.transport ipc", sys.stderr)
        self.saved_step = self.progress.step
        self.first_step = self.progress.step + 1
        self.saver = Saver(config, mesh, policy, reference)
        self.parts = Parts(
            config=config, mesh=mesh, metrics=metrics, tokenizer=inputs.tokenizer,
            sampler=PromptSampler(inputs.train_prompts, config.batch.prompts_per_step, config.run.seed,
                                  config.data.shuffle, inputs.train_prompts.sizes, config.data.weights),
            rewards=inputs.rewards, rollout=rollout, policy=policy, reference=reference,
            weight_sync=WeightSync(config.weight_sync, mesh, policy, rollout, Tenant.WEIGHTS in plan.residents),
            memory=Memory(mesh, rollout, lambda: storages(policy, reference), host_memory, metrics, plan,
                          mesh.on_main(lambda: [run_folder.open_memory_timeline(config.run.output_dir)])),
            user_advantages=inputs.user_advantages, user_loss=inputs.user_loss,
            recorders=mesh.on_main(lambda: self._recorders()))
        self.parts.weight_sync.version = self.progress.weights_version - 1
        sync(self.parts)
        gc.collect()
        gc.freeze()  # a collection, which vLLM's sleep asks for each step, need not look at what start-up made
        start_up = metrics.reduce()  # the first step's times are its own
        say_once(", ".join(f"{name.removeprefix('timing/')} {value:.1f} s" for name, value in start_up.items()
                           if name.startswith("timing/")))
        if checkpoint:
            checkpoint_module.load_generators(checkpoint, mesh)

    def _recorders(self) -> list[Recorder]:
        run = self.config.run
        return [Recorder(os.path.join(run.output_dir, run_folder.ROLLOUTS))] if run.record_rollouts else []

    def close(self) -> None:
        """Shut down in the reverse order; the process group last."""
        parts = self.parts
        parts.metrics.close()
        parts.memory.close()
        parts.rewards.close()
        self.mesh.leave_together()
        parts.policy.close()
        if parts.reference:
            parts.reference.close()
        parts.rollout.close()
        self.mesh.close()
