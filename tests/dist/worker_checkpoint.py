"""One rank of test_saved_state.py: trains, saves, loads and trains on, with the real policy and no engine.

    torchrun --nproc_per_node N worker_checkpoint.py JOB.json

JOB.json has `model`, `folder`, `cells` (name, stage, dtype), and the `device` if not cpu. For each cell the folder gets
NAME.json with what each rank found, and the run folder NAME with its checkpoints. A cell with `source`, the run folder
of another cell, goes on from that one's checkpoint of step 2, which other ranks or another stage may have written.
"""

import contextlib
import hashlib
import json
import random
import sys
from pathlib import Path

import numpy as np
import torch
from ranks import one_rank
from worker_learn import RAGGED, completions_of

from spmd_rl import checkpoint, run_folder
from spmd_rl.batch import pack, plan_step
from spmd_rl.checkpoint import Progress, Saver
from spmd_rl.config import (BatchConfig, CheckpointConfig, Config, LossConfig, ModelConfig, PolicyConfig,
                            RunConfig)
from spmd_rl.mesh import generator_states, restore_generators
from spmd_rl.metrics import Metrics
from spmd_rl.model import load_hf_config
from spmd_rl.policy import Policy, Reference
from spmd_rl.step import Parts, learn, refresh_reference, set_advantages
from spmd_rl.watchdog import leave

NUM_STEPS = 5


class Still:
    """In place of Memory: nothing moves."""

    def enter(self, phase):
        pass

    def wait_for_step(self):
        pass

    def holding(self, tenants):
        return contextlib.nullcontext()


def optimizer_tensors(policy):
    """Masters, moments and counts of steps of this rank, in order."""
    outer = policy.engine.optimizer
    base = getattr(outer, "optimizer", outer)
    # At stage 3 the base optimizer has its parameters only while it steps.
    masters = getattr(outer, "fp32_partitioned_groups_flat", None) or [
        p for group in base.param_groups for p in group["params"]]
    states = [base.state[master][name] for master in masters for name in ("exp_avg", "exp_avg_sq", "step")]
    assert masters and len(base.state) == len(masters), f"{len(masters)} masters, {len(base.state)} states"
    return [t.detach() for t in masters + states]


def digest(tensors):
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def state_of(policy, reference):
    """Checksums of the weights, the reference's among them, and of the optimizer's tensors."""
    return {"weights": digest([t for engine in (policy, reference) if engine for _, t in engine.full_weights(2**20)]),
            "optimizer": digest(optimizer_tensors(policy))}


class Cell:
    def __init__(self, cell, job, mesh):
        self.mesh = mesh
        self.config = Config(
            run=RunConfig(output_dir=str(Path(job["folder"], cell["name"])), max_steps=NUM_STEPS),
            model=ModelConfig(path=job["model"], dtype=cell["dtype"]), checkpoint=CheckpointConfig(keep=2),
            batch=BatchConfig(max_tokens_per_microbatch=32),
            loss=LossConfig(beta=0.1, ref_model_sync_steps=1) if cell.get("reference") else LossConfig(),
            policy=PolicyConfig(zero_stage=cell["stage"], learning_rate=1e-3, lr_scheduler_type="linear",
                                # Two parameter groups, whose members lie between one another in the model.
                                warmup_steps=2, gradient_checkpointing=False, weight_decay=0.01),
            deepspeed={"zero_optimization": cell["raw"]} if "raw" in cell else {})

    def engines(self):
        """A fresh policy, and its reference where the cell has one."""
        policy = Policy(self.config, self.mesh, load_hf_config(self.config.model))
        has_one = self.config.loss.beta > 0
        return policy, Reference(self.config, self.mesh, load_hf_config(self.config.model)) if has_one else None

    def learn(self, policy, reference):
        metrics = Metrics(self.mesh, [])
        parts = Parts(config=self.config, mesh=self.mesh, metrics=metrics, tokenizer=None, sampler=None, rewards=None,
                      rollout=None, policy=policy, reference=reference, weight_sync=None, memory=Still())
        completions = completions_of(RAGGED)
        set_advantages(parts, completions)
        learn(parts, completions)
        refresh_reference(parts, 0)
        found = metrics.reduce()
        names = ("loss", "grad_norm", "learning_rate", "entropy", "kl")
        return {name: found[name] for name in names if name in found} | state_of(policy, reference)

    def save(self, engines, step):
        Saver(self.config, self.mesh, *engines).save(Progress(step, step))

    def save_beside(self, engines, step):
        """Save while the next step changes all that is saved; returns that step's metrics."""
        self.config.checkpoint.background = True
        saver = Saver(self.config, self.mesh, *engines)
        saver.save(Progress(step, step))
        found = self.learn(*engines)
        saver.finish()
        self.config.checkpoint.background = False
        return found

    def resumed(self, step, folder=None):
        """Fresh engines with the checkpoint of a step, and their state before any learning."""
        engines = self.engines()
        path = run_folder.checkpoint_path(folder or self.config.run.output_dir, step)
        assert checkpoint.load(path, *engines) == Progress(step, step)
        checkpoint.load_generators(path, self.mesh)
        return engines, state_of(*engines)


def close(engines):
    for engine in engines:
        if engine:
            engine.close()


def draws():
    """Of every generator that a rank has."""
    devices = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    return [random.random(), float(np.random.rand()), *(float(torch.rand(1, device=device)) for device in devices)]


def run_cell(cell, job, mesh):
    made = Cell(cell, job, mesh)
    for folder in mesh.on_main(lambda: [Path(made.config.run.output_dir)]):
        folder.mkdir()
        (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    mesh.barrier()
    found = going_on(made, cell["source"]) if "source" in cell else straight_and_resumed(made, cell)
    results = mesh.all_gather(found)
    for path in mesh.on_main(lambda: [Path(job["folder"], cell["name"] + ".json")]):
        path.write_text(json.dumps(results))


def going_on(made, source):
    """What a run of other ranks or another stage left, saved again at once, and the steps from there."""
    engines, loaded = made.resumed(2, source)
    made.save(engines, 2)
    found = {"loaded": loaded, "resumed": [made.learn(*engines) for _ in range(3, NUM_STEPS + 1)]}
    close(engines)
    return found


def skip_a_step(policy, mesh):
    """A gradient that is not finite: an optimizer step that is none."""
    plan = plan_step(completions_of(RAGGED), mesh.world_size, 32)
    rows = [pack(row, mesh.device, policy.row_block) for row in mesh.mine(plan)]
    policy.forward_backward(rows, lambda mb, logprobs_N, entropy_N: logprobs_N.sum() * float("inf"))
    assert not policy.step().is_applied, "the step was applied"


def straight_and_resumed(made, cell):
    """Five steps at once; a resume after the second, and one of that after the third."""
    found = {}
    engines = made.engines()
    found["straight"] = []
    for step in range(1, NUM_STEPS + 1):
        if step == 3:  # what the copy of step 2 must not see
            found["straight"].append(made.save_beside(engines, 2))
            continue
        found["straight"].append(made.learn(*engines))
        if step == 1:
            made.save(engines, step)
        if step == 2:
            generators = generator_states()
            found["draws"] = draws()
            restore_generators(generators)
    if cell["dtype"] == "bfloat16":
        found["masters are finer"] = any(bool((t != t.bfloat16().float()).any()) for t in optimizer_tensors(engines[0])
                                         if t.dtype == torch.float32)
    close(engines)

    engines, found["loaded"] = made.resumed(2)
    found["draws after"] = draws()
    found["resumed"] = [made.learn(*engines)]
    made.save(engines, 3)
    close(engines)

    engines, found["loaded again"] = made.resumed(3)
    found["resumed again"] = [made.learn(*engines), made.learn(*engines)]
    if cell.get("skips"):
        skip_a_step(engines[0], made.mesh)
        made.config.checkpoint.keep = 3
        made.save(engines, 6)
        counts = [engines[0].progress()]
        close(engines)
        engines, _ = made.resumed(6)
        found["counts"] = [*counts, engines[0].progress()]
        close(engines)
        made.config.policy.learning_rate *= 2
        engines, _ = made.resumed(3)
        found["learning rate of step 4, doubled"] = engines[0].engine.get_lr()[0]
    close(engines)
    return found


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    with one_rank(job.get("device", "cpu")) as mesh:
        for cell in job["cells"]:
            mesh.phase = cell["name"]
            run_cell(cell, job, mesh)


if __name__ == "__main__":
    main()
    leave(0)  # results are written; the tear-down of the interpreter now and then aborts
