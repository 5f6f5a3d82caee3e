"""Train: ``torchrun --nproc_per_node N -m spmd_rl.train --config FILE [--section.option value ...]``.

Plain ``python -m spmd_rl.train`` is one rank. ``--print_config`` prints the resolved config, ``--dry_run``
checks everything that needs no weights.
"""

import json
import os
import sys
import time

from spmd_rl.checkpoint import export
from spmd_rl.config import Config, ConfigError, parse
from spmd_rl.evaluate import evaluate
from spmd_rl.job import Inputs, Job, arithmetic, load_inputs
from spmd_rl.mesh import Mesh, Ranks, say_once
from spmd_rl.step import train_step

EXIT_USAGE = 2


def main(args: list[str] | None = None) -> None:
    """Run from the command line; exits with 2 for a config that cannot be used, with 1 after a failure."""
    try:
        config, dry_run = parse(args)
        world_size = Ranks.from_environment().world_size
        inputs = load_inputs(config, world_size)
    except ConfigError as error:
        say_once(f"error: {error}", sys.stderr)
        sys.exit(EXIT_USAGE)
    say_once(arithmetic(config, inputs, world_size))
    if dry_run:
        return
    mesh = Mesh(config.mesh, config.rollout.tensor_parallel_size, config.run.seed)
    try:
        train(config, mesh, inputs)
    except BaseException as error:
        mesh.fail(error)


def train(config: Config, mesh: Mesh, inputs: Inputs) -> None:
    """The whole run: evaluate, steps, evaluate, export."""
    job = Job(config, mesh, inputs)
    parts, max_steps = job.parts, config.run.max_steps
    accuracy = [_evaluate(job, 0)]
    start = time.perf_counter()
    for step in range(max_steps):
        metrics = train_step(parts, step)
        done = step + 1
        parts.metrics.write(done, metrics)
        if config.evaluate.eval_steps and done % config.evaluate.eval_steps == 0 and done < max_steps:
            accuracy.append(_evaluate(job, done))
        if config.checkpoint.export_steps and done % config.checkpoint.export_steps == 0 and done < max_steps:
            _export(job, f"export-{done}")
    train_seconds = time.perf_counter() - start
    accuracy.append(_evaluate(job, max_steps))
    _export(job, "export")
    for path in mesh.on_main(lambda: [os.path.join(config.run.output_dir, "summary.json")]):
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"accuracy_before": accuracy[0], "accuracy_after": accuracy[-1],
                       "train_seconds": round(train_seconds, 2), "steps": max_steps}, file, indent=1)
    job.close()
    if accuracy[0] is not None:
        say_once(f"held-out accuracy: {accuracy[0]:.4f} before, {accuracy[-1]:.4f} after")
    say_once(f"the run's files: {config.run.output_dir}")


def _evaluate(job: Job, step: int) -> float | None:
    """Held-out mean of the first reward function; None without held-out prompts."""
    if not job.inputs.eval_prompts:
        return None
    found = evaluate(job.parts, job.inputs.eval_prompts)
    job.parts.metrics.write(step, found)
    return found[f"eval/rewards/{job.parts.rewards.names[0]}/mean"]


def _export(job: Job, name: str) -> None:
    folder = os.path.join(job.config.run.output_dir, name)
    export(folder, job.parts.policy, job.parts.tokenizer, job.config, job.mesh)


if __name__ == "__main__":
    main()
