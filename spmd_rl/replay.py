"""The learning half alone, on recorded rollouts and without an engine: for golden tests, benchmarks, a debugger."""

import os
from dataclasses import dataclass
from typing import Any

from spmd_rl import checks, run_folder
from spmd_rl.config import Config, ConfigError, as_dict, load_function
from spmd_rl.memory import Resident
from spmd_rl.mesh import Mesh, say_once
from spmd_rl.metrics import Metrics, completion_metrics
from spmd_rl.model import load_hf_config, weight_files
from spmd_rl.policy import Policy, Reference
from spmd_rl.recording import read_step, recorded_steps
from spmd_rl.signals import StopRequest
from spmd_rl.sinks import make_sinks
from spmd_rl.step import Parts, replay_step


@dataclass
class Recorded:
    """What a replay needs besides weights: checked before anything is loaded."""

    hf_config: Any
    paths: list[str]
    """A file a step."""
    user_loss: Any
    user_advantages: Any


def load_recorded(config: Config, world_size: int) -> Recorded:
    """Check everything that needs no weights. Raises ConfigError."""
    checks.validate(config, world_size)
    folder, output = (os.path.realpath(path) for path in (str(config.run.replay), config.run.output_dir))
    if os.path.commonpath([folder, output]) == output:
        raise ConfigError(f"run.output_dir is {config.run.output_dir!r}: the recorded rollouts are in it, and an "
                          "earlier run's files go aside; set another folder")
    weight_files(config.model.path)
    loss, advantages = config.loss.loss_type, config.advantages.function
    return Recorded(load_hf_config(config.model), recorded_steps(str(config.run.replay)),
                    load_function(loss, "loss.loss_type") if ":" in loss else None,
                    load_function(advantages, "advantages.function") if advantages else None)


def replay(config: Config, mesh: Mesh, recorded: Recorded, stop: StopRequest) -> bool:
    """Learn from each recorded step in order, run.max_steps of them at most, from the weights at model.path. Nothing
    but metrics is written. Collective.

    With the options of the recorded run losses, gradient norms and weights are that run's. False where it was ended
    before the last step.
    """
    sinks = mesh.on_main(lambda: make_sinks(config.metrics, run_folder.open_folder(config, None),
                                            config.run.max_steps, 0, as_dict(config)))
    metrics = Metrics(mesh, sinks, config.metrics)
    policy = Policy(config, mesh, recorded.hf_config)
    reference = Reference(config, mesh, load_hf_config(config.model)) if config.loss.beta > 0 else None
    absent: Any = None  # what samples: the learning half touches none of it
    resident: Any = Resident()
    parts = Parts(config=config, mesh=mesh, metrics=metrics, policy=policy, reference=reference,
                  user_loss=recorded.user_loss, user_advantages=recorded.user_advantages, tokenizer=absent,
                  sampler=absent, rewards=absent, rollout=absent, weight_sync=absent, memory=resident)
    reason = None
    for step, path in enumerate(recorded.paths[:config.run.max_steps]):
        reason = next((r for r in mesh.all_gather(stop.reason()) if r), None)
        if reason:
            break
        completions = read_step(path)
        for name, value in completion_metrics(completions, []).items():
            metrics.maximum(name, value)
        metrics.write(step + 1, replay_step(parts, completions, step))
    metrics.close()
    mesh.leave_together()
    policy.close()
    if reference:
        reference.close()
    mesh.close()
    say_once(f"{f'{reason}: ended early; ' if reason else ''}metrics: "
             f"{os.path.join(config.run.output_dir, run_folder.METRICS)}")
    return reason is None
