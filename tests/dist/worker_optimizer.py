"""One rank of test_optimizer.py: worker_optimizer.py MODEL FOLDER [CELL ...]. FOLDER gets CELL.json, an entry a rank.

A cell is what-dtype-stage: `nonfinite` makes optimizer steps of which some have no finite gradient, `small` updates
below half of a bf16 weight's spacing, `tiny` ten thousand still smaller ones.
"""

import json
import sys
from pathlib import Path

import torch
from worker_checkpoint import digest, masters, optimizer_tensors

from spmd_rl import policy as policy_module
from spmd_rl.batch import Completion, pack
from spmd_rl.config import Config
from spmd_rl.mesh import Mesh, leave
from spmd_rl.model import load_hf_config
from spmd_rl.policy import Policy

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


def nonfinite(model, dtype, stage, mesh, folder):
    """What each optimizer step did, and what a fresh policy with the checkpoint makes of one more."""
    config = config_of(model, dtype, stage, learning_rate=1e-3, lr_scheduler_type="linear", max_nonfinite_steps=3)

    def learn(policy, factor):
        mine = mesh.mine([1.0] * (mesh.world_size - 1) + [factor])
        policy.forward_backward(one_row(mesh), lambda mb, logprobs_N, entropy_N: logprobs_N.sum() * mine)
        result = policy.step()
        state = digest([*(t for _, t in policy.full_weights(2**20)), *optimizer_tensors(policy)])
        return {"is_applied": result.is_applied, "learning_rate": result.learning_rate, "norm": result.grad_norm,
                "state": state}

    policy = Policy(config, mesh, load_hf_config(config.model))
    found = []
    for number, factor in enumerate(FACTORS, 1):
        mesh.step = number
        found.append(learn(policy, factor))
    base = getattr(policy.engine.optimizer, "optimizer", policy.engine.optimizer)
    counted = sorted({int(state["step"]) for state in base.state.values()})
    policy.save(f"{folder}/policy")
    mesh.barrier()
    policy.close()
    policy = Policy(config, mesh, load_hf_config(config.model))
    policy.load(f"{folder}/policy")
    mesh.step, mesh.phase = 7, "optimizer"
    try:
        learn(policy, float("nan"))
        error = None
    except FloatingPointError as raised:
        error = str(raised)
    policy.close()
    return {"steps": found, "error": error, "counted": counted}


def updates(model, dtype, stage, mesh, folder, learning_rate, count):
    """Masters and weight after half of the updates, and after all with a save and a load between the halves."""
    config = config_of(model, dtype, stage, optimizer="sgd", learning_rate=learning_rate, max_grad_norm=0.0)
    weight_type = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    policy_module.model.build = policy_module.model.build_sharded = lambda *args: OneWeight(weight_type)
    row, found = one_row(mesh), []
    for _ in range(2):
        policy = Policy(config, mesh, None)
        if found:
            policy.load(f"{folder}/policy")
        for _ in range(count // 2):
            policy.forward_backward(row, lambda mb, logprobs_N, entropy_N: logprobs_N.sum() / mesh.world_size)
            policy.step()
        (_, weight), = policy.full_weights(2**20)
        whole = mesh.gather_lists([value for t in masters(policy) for value in t.reshape(-1).tolist()])
        mine = {value for value in whole if 0.9 < value < 1.1}  # what fills a shard up may be anything
        found.append({"masters": sorted(mine), "weight": weight.item()})
        policy.save(f"{folder}/policy")
        mesh.barrier()
        policy.close()
    return found


CELLS = {"nonfinite": nonfinite,
         "small": lambda *args: updates(*args, learning_rate=1e-3, count=10),
         "tiny": lambda *args: updates(*args, learning_rate=1e-6, count=10_000)}


def main():
    model, folder, *cells = sys.argv[1:]
    config = Config()
    config.mesh.device, config.mesh.timeout_s = "cpu", 60
    mesh = Mesh(config.mesh, 1, 0)
    build = policy_module.model.build, policy_module.model.build_sharded
    try:
        for cell in cells:
            mesh.phase = cell
            what, dtype, stage = cell.split("-")
            own = Path(folder, cell)
            for path in mesh.on_main(lambda: [own]):
                path.mkdir()
            mesh.barrier()
            results = mesh.all_gather(CELLS[what](model, dtype, int(stage), mesh, own))
            policy_module.model.build, policy_module.model.build_sharded = build
            for path in mesh.on_main(lambda: [Path(folder, f"{cell}.json")]):
                path.write_text(json.dumps(results))
    except BaseException as error:
        mesh.fail(error)
    mesh.leave_together()
    mesh.close()


if __name__ == "__main__":
    main()
    leave(0)  # results are written; the tear-down of the interpreter now and then aborts
