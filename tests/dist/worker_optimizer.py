"""One rank of test_optimizer.py: worker_optimizer.py MODEL FOLDER [CELL ...]. FOLDER gets CELL.json, an entry a rank.

A cell is what-dtype-stage: `nonfinite` makes optimizer steps of which some have no finite gradient, `small` updates
below half of a bf16 weight's spacing, `tiny` ten thousand still smaller ones.
"""

import json
import sys
from pathlib import Path
from unittest import mock

import torch
from ranks import one_rank
from worker_checkpoint import digest, optimizer_tensors

from spmd_rl import policy as policy_module
from spmd_rl.batch import Completion, pack
from spmd_rl.config import Config
from spmd_rl.model import load_hf_config
from spmd_rl.policy import Policy
from spmd_rl.watchdog import leave

FACTORS = [1.0, float("nan"), float("inf"), 1.0, float("nan"), float("nan")]  # of the last rank's part of the loss


class OneWeight(torch.nn.Module):
    """A model whose log-prob is its only weight, which starts at 1: the gradient of the loss below is 1."""

    def __init__(self, dtype):
        super().__init__()
        self.lm = torch.nn.Linear(1, 1, bias=False, dtype=dtype)
        self.lm.config = None
        torch.nn.init.ones_(self.lm.weight)

    def forward(self, *row):
        logprobs_N = self.lm.weight.float().reshape(1)
        return logprobs_N, logprobs_N * 0


def config_of(model, dtype, stage, **fields):
    config = Config()
    config.model.path, config.model.dtype, config.policy.zero_stage = model, dtype, stage
    config.policy.gradient_checkpointing, config.run.max_steps = False, 10
    for name, value in fields.items():
        setattr(config.policy, name, value)
    return config


def one_row(mesh):
    return [pack([Completion(0, 0, [1, 2, 3], [4, 5], [0.0, 0.0], "stop", 0)], mesh.device)]


def base_optimizer(policy):
    return getattr(policy.engine.optimizer, "optimizer", policy.engine.optimizer)


def nonfinite(model, dtype, stage, mesh):
    """What each optimizer step did, and what one more without a finite gradient raises."""
    config = config_of(model, dtype, stage, learning_rate=1e-3, lr_scheduler_type="linear", max_nonfinite_steps=3)
    policy = Policy(config, mesh, load_hf_config(config.model))

    def learn(factor):
        mine = mesh.mine([1.0] * (mesh.world_size - 1) + [factor])
        policy.forward_backward(one_row(mesh), lambda mb, logprobs_N, entropy_N: logprobs_N.sum() * mine)
        result = policy.step()
        state = digest([*(t for _, t in policy.full_weights(2**20)), *optimizer_tensors(policy)])
        return {"is_applied": result.is_applied, "learning_rate": result.learning_rate, "norm": result.grad_norm,
                "state": state}

    found = []
    for mesh.step, factor in enumerate(FACTORS, 1):
        found.append(learn(factor))
    counted = sorted({int(state["step"]) for state in base_optimizer(policy).state.values()})
    mesh.step = len(FACTORS) + 1
    try:
        learn(float("nan"))
        error = None
    except FloatingPointError as raised:
        error = str(raised)
    policy.close()
    return {"steps": found, "error": error, "counted": counted}


def updates(model, dtype, stage, mesh, learning_rate, count):
    """The weight, and its masters on all ranks, after so many updates."""
    config = config_of(model, dtype, stage, optimizer="sgd", learning_rate=learning_rate, max_grad_norm=0.0)
    stand_in = OneWeight(torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    with mock.patch.multiple(policy_module.model, build=lambda *args: stand_in, build_sharded=lambda *args: stand_in,
                             shape=lambda lm: None):
        policy, row = Policy(config, mesh, None), one_row(mesh)
    for _ in range(count):
        policy.forward_backward(row, lambda mb, logprobs_N, entropy_N: logprobs_N.sum() / mesh.world_size)
        policy.step()
    (_, weight), = policy.full_weights(2**20)
    # At stage 3 the base optimizer has its parameters only while it steps.
    masters = getattr(policy.engine.optimizer, "fp32_partitioned_groups_flat", None) or [
        p for group in base_optimizer(policy).param_groups for p in group["params"]]
    whole = mesh.gather_lists([value for t in masters for value in t.reshape(-1).tolist()])
    found = {"masters": sorted({value for value in whole if 0.9 < value < 1.1}), "weight": weight.item()}
    policy.close()
    return found  # what fills a shard up may be anything: masters are those near 1


CELLS = {"nonfinite": nonfinite,
         "small": lambda *args: updates(*args, learning_rate=1e-3, count=10),
         "tiny": lambda *args: updates(*args, learning_rate=1e-6, count=10_000)}


def main():
    model, folder, *cells = sys.argv[1:]
    with one_rank() as mesh:
        for cell in cells:
            mesh.phase = cell
            what, dtype, stage = cell.split("-")
            results = mesh.all_gather(CELLS[what](model, dtype, int(stage), mesh))
            for path in mesh.on_main(lambda: [Path(folder, f"{cell}.json")]):
                path.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
    leave(0)  # results are written; the tear-down of the interpreter now and then aborts
