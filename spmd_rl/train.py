"""Train: ``torchrun --nproc_per_node N -m spmd_rl.train --config FILE [--section.option value ...]``.

Plain ``python -m spmd_rl.train`` is one rank. ``--print_config`` prints the resolved config, ``--dry_run``
checks everything that needs no weights. A run that was ended goes on from its newest checkpoint when it is started
again with the same options. ``--replay DIR`` learns from recorded rollouts alone.
"""

import json
import os
import sys
import time

import torch

from spmd_rl import checkpoint, run_folder
from spmd_rl.checks import check_cpu_engine, sampler_differences
from spmd_rl.config import Config, ConfigError, parse
from spmd_rl.evaluate import evaluate, first_accuracy
from spmd_rl.export import export
from spmd_rl.files import replacing
from spmd_rl.job import Inputs, Job, arithmetic, load_inputs, memory_plan
from spmd_rl.mesh import Mesh, Ranks, check_device, device_bytes, say_error, say_once
from spmd_rl.offload import Tenant
from spmd_rl.plan import Plan
from spmd_rl.replay import load_recorded, replay
from spmd_rl.signals import EXIT_STOPPED, StopRequest
from spmd_rl.step import sync_again, train_step
from spmd_rl.watchdog import leave

EXIT_USAGE = 2
SAVED = (Tenant.WEIGHTS, Tenant.MASTERS, Tenant.MOMENTS, Tenant.REFERENCE)  # what a checkpoint is made of


def main(args: list[str] | None = None) -> None:
    """Run from the command line. Exit codes: 0 done, 1 a failure, 2 a config that cannot be used, 75 ended early by a
    signal or run.max_train_minutes."""
    try:
        config, dry_run = parse(args)
        world_size = Ranks.from_environment().world_size
        device = check_device(config.mesh)
        inputs = load_inputs(config, world_size) if config.run.replay is None else load_recorded(config, world_size)
        if device.type == "cpu" and isinstance(inputs, Inputs):
            check_cpu_engine(config)
        run_folder.check(config)
    except ConfigError as error:
        say_error(str(error))
        sys.exit(EXIT_USAGE)
    if isinstance(inputs, Inputs):
        say_once(arithmetic(config, inputs, world_size))
        if dry_run:
            _say_plan(config, inputs, world_size, device)
    if dry_run:
        return
    stop = StopRequest(config.run.max_train_minutes)
    plan = None  # a replay has no engine to take turns with
    if isinstance(inputs, Inputs):
        inputs.rewards.start()  # its processes are forked from one that has never seen a GPU
    try:
        mesh = Mesh(config.mesh, config.rollout.tensor_parallel_size, config.run.seed)
        if isinstance(inputs, Inputs):
            plan = memory_plan(config, inputs, world_size, mesh.smallest_device_bytes())
    except ConfigError as error:
        say_error(str(error))
        sys.exit(EXIT_USAGE)
    if plan and plan.device_bytes:
        say_once("\n".join(plan.lines()))
    try:
        if isinstance(inputs, Inputs):
            assert plan is not None, "a run without its plan"
            finished = train(config, mesh, inputs, plan, stop)
        else:
            finished = replay(config, mesh, inputs, stop)
    except BaseException as error:
        mesh.fail(error)
    if not finished:
        leave(EXIT_STOPPED)  # all at once: a launcher that sees the first rank leave kills the others


def _say_plan(config: Config, inputs: Inputs, world_size: int, device: torch.device) -> None:
    """The table of phases and tenants. Exits where a phase cannot fit."""
    try:
        plan = memory_plan(config, inputs, world_size, device_bytes(device))
    except ConfigError as error:
        say_error(str(error))
        sys.exit(EXIT_USAGE)
    say_once("\n".join(plan.lines()))


def train(config: Config, mesh: Mesh, inputs: Inputs, plan: Plan, stop: StopRequest) -> bool:
    """The whole run: evaluate, steps, evaluate, export. False where it was ended before its last step."""
    job = Job(config, mesh, inputs, plan, checkpoint.choose(config, mesh))
    try:
        return _run(job, stop)
    except Exception as error:
        if explained := job.parts.memory.explain(error):
            raise MemoryError(explained) from error
        raise


def _run(job: Job, stop: StopRequest) -> bool:
    config, mesh = job.config, job.mesh
    progress = job.progress
    start = time.perf_counter() - progress.train_seconds
    if progress.step == 0:
        progress.accuracy_before = _evaluate(job, 0)
        start = time.perf_counter()
    while progress.step < config.run.max_steps:
        job.saver.advance()
        reason = next((r for r in mesh.all_gather(stop.reason()) if r), None)
        if reason:
            _end_early(job, reason)
            return False
        _one_step(job)
        progress.train_seconds = time.perf_counter() - start
        if _is_due(config.checkpoint.save_steps, progress.step) or (
                config.checkpoint.save_steps and progress.step == config.run.max_steps):
            _save(job)
    job.saver.finish()
    _export(job, "export")  # before the last evaluation: a reward that fails there must not cost the weights
    accuracy = _evaluate(job, progress.step)
    _summarise(job, accuracy)
    job.close()
    if accuracy is not None:
        say_once(f"held-out accuracy: {progress.accuracy_before:.4f} before, {accuracy:.4f} after")
    say_once(f"the run's files: {config.run.output_dir}")
    return True


def _one_step(job: Job) -> None:
    """A step, and the evaluation and export that are due after it."""
    config, progress, last = job.config, job.progress, job.config.run.max_steps
    job.mesh.step = progress.step + 1
    with job.profiler.around(progress.step + 1):
        metrics = train_step(job.parts, progress.step)
    progress.step += 1
    progress.weights_version = job.parts.weight_sync.version
    job.parts.metrics.write(progress.step, metrics)
    warning = sampler_warning(config, metrics)
    if warning and progress.step == job.first_step:
        say_once(f"warning: {warning}", sys.stderr)
    if progress.step < last and _is_due(config.evaluate.eval_steps, progress.step):
        _evaluate(job, progress.step)
    if progress.step < last and _is_due(config.checkpoint.export_steps, progress.step):
        _export(job, f"export-{progress.step}")


def sampler_warning(config: Config, metrics: dict[str, float]) -> str | None:
    """What options make sampler and policy differ by construction, and by how much in this step; None without any."""
    options = sampler_differences(config)
    if not options or "sampling/kl" not in metrics:
        return None
    text = (f"with {', '.join(options)} the sampler is not the policy: policy over sampler is "
            f"{metrics['sampling/importance_sampling_ratio/mean']:.3g} a token in the mean, mean |log-prob gap| "
            f"{metrics['sampling/sampling_logp_difference/mean']:.3g}, KL {metrics['sampling/kl']:.3g}; ")
    if not config.loss.importance_sampling_correction:
        return text + "nothing corrects it (loss.importance_sampling_correction is false)"
    return text + (f"loss.importance_sampling_mode {config.loss.importance_sampling_mode} weighs a token's loss by "
                   f"{metrics['sampling/importance_sampling_weight/mean']:.3g} in the mean and leaves "
                   f"{100 * metrics['sampling/masked_fraction']:.3g} % of the tokens out")


def _is_due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _end_early(job: Job, reason: str) -> None:
    """Save what is not saved yet, and agree to leave; the engines end with the process."""
    step = job.progress.step
    if step > job.saved_step:
        _save(job)
    job.saver.finish()
    job.parts.metrics.close()
    say_once(f"{reason}: ended after step {step} of {job.config.run.max_steps}; start again with the same options to "
             "go on")
    job.mesh.leave_together()


def _save(job: Job) -> None:
    with job.parts.memory.holding(SAVED), job.parts.metrics.timed("save"):
        job.saver.save(job.progress)
    sync_again(job.parts)
    job.saved_step = job.progress.step


def _summarise(job: Job, accuracy: float | None) -> None:
    progress = job.progress
    for path in job.mesh.on_main(lambda: [os.path.join(job.config.run.output_dir, "summary.json")]):
        with replacing(path) as file:
            json.dump({"accuracy_before": progress.accuracy_before, "accuracy_after": accuracy,
                       "train_seconds": round(progress.train_seconds, 2), "steps": progress.step}, file, indent=1)


def _evaluate(job: Job, step: int) -> float | None:
    """Held-out mean of the first reward function on the first set; None without held-out prompts."""
    sets = job.inputs.eval_prompts
    if not sets:
        return None
    job.parts.weight_sync.check_current()
    found = evaluate(job.parts, sets)
    job.parts.metrics.write(step, found)
    return first_accuracy(found, sets, job.parts.rewards.names[0])


def _export(job: Job, name: str) -> None:
    folder = os.path.join(job.config.run.output_dir, name)
    with job.parts.memory.holding([Tenant.WEIGHTS]):
        export(folder, job.parts.policy, job.parts.tokenizer, job.config, job.mesh)
    sync_again(job.parts)


if __name__ == "__main__":
    main()
    leave(0)  # all is closed; the interpreter's tear-down now and then meets a thread of torch's and aborts
