"""One rank that learns given completions in many cells, with the real policy and no engine.

    torchrun --nproc_per_node N worker_learn.py JOB.json

JOB.json has `model`, `folder`, `rollouts` (a file, see `write_rollouts`) and `cells`: a name and sections of the
config each. For each cell the folder gets NAME.json (the metrics of each rollout) and NAME.safetensors (the weights
after all of them).
"""

import json
import random
import sys
from dataclasses import asdict
from pathlib import Path

from deepspeed.utils import get_z3_leaf_modules
from ranks import one_rank
from safetensors.torch import save_file

from spmd_rl.batch import Completion
from spmd_rl.config import (AdvantagesConfig, BatchConfig, Config, LossConfig, ModelConfig, PolicyConfig,
                            RolloutConfig, RunConfig)
from spmd_rl.memory import Resident
from spmd_rl.metrics import Metrics
from spmd_rl.model import load_hf_config
from spmd_rl.policy import Policy, Reference
from spmd_rl.step import Parts, learn, refresh_reference, set_advantages
from spmd_rl.watchdog import leave

SECTIONS = {"rollout": RolloutConfig, "batch": BatchConfig, "advantages": AdvantagesConfig, "loss": LossConfig,
            "policy": PolicyConfig}

# Each rollout: (group, reward, tokens of the prompt, tokens of the completion[, whether it is trained]).
RAGGED = [(0, 1.0, 5, 9), (0, 0.0, 5, 2), (0, 0.25, 5, 16), (0, 0.0, 5, 1), (0, 0.5, 5, 10, False),
          (1, 1.0, 3, 4), (1, 1.0, 3, 7), (1, 1.0, 3, 3), (1, 1.0, 3, 12),  # a flat group: advantage 0, still counted
          (2, 0.0, 11, 6), (2, 1.0, 11, 5), (2, 1.0, 11, 8)]
# One completion with trained tokens: from 2 ranks on, one rank trains nothing.
FEW = [(0, 1.0, 4, 6), (0, 0.0, 4, 0), (0, 0.0, 4, 5, False)]
STEPS = [FEW, RAGGED]  # this way round, a KL taken off the rewards tells many completions apart


def completions_of(step, vocabulary=256):
    """The same completions in every process."""
    draw = random.Random(len(step))
    prompt_ids = {group: [draw.randrange(vocabulary) for _ in range(length)] for group, _, length, *_ in step}
    made = []
    for place, (group, reward, _, length, *is_trained) in enumerate(step):
        ids = [draw.randrange(vocabulary) for _ in range(length)]
        made.append(Completion(group, place, prompt_ids[group], ids, [-1.0] * length, "length", 0, reward=reward,
                               is_trained=all(is_trained)))
    return made


def write_rollouts(path, steps):
    """A line a rollout: its completions' fields."""
    path.write_text("".join(json.dumps([asdict(c) for c in completions]) + "\n" for completions in steps))


def read_rollouts(path):
    """What `write_rollouts` wrote."""
    return [[Completion(**fields) for fields in json.loads(line)] for line in Path(path).read_text().splitlines()]


def config_of(cell, model, num_steps):
    """The cell's config: what it says, over the defaults."""
    sections = {name: make(**cell.get(name, {})) for name, make in SECTIONS.items()}
    return Config(run=RunConfig(max_steps=num_steps), model=ModelConfig(path=model, dtype=cell.get("dtype", "float32")),
                  deepspeed=cell.get("deepspeed", {}), **sections)


def second_shards(engine):
    """How many parameters have one now."""
    return sum(getattr(p, "ds_secondary_tensor", None) is not None for p in engine.model.parameters())


def run_cell(cell, job, mesh):
    steps = read_rollouts(job["rollouts"])
    config = config_of(cell, job["model"], len(steps))
    metrics = Metrics(mesh, [])
    policy = Policy(config, mesh, load_hf_config(config.model))
    left = [second_shards(policy)]
    reference = Reference(config, mesh, load_hf_config(config.model)) if config.loss.beta else None
    parts = Parts(config=config, mesh=mesh, metrics=metrics, tokenizer=None, sampler=None, rewards=None, rollout=None,
                  policy=policy, reference=reference, weight_sync=None, memory=Resident())
    targets, seconds = [], []
    forward_backward = policy.forward_backward

    def counted(micro_batches, loss):
        targets.append([mb.num_targets for mb in micro_batches])
        forward_backward(micro_batches, loss)
        seconds.append(second_shards(policy))

    policy.forward_backward = counted
    results = []
    for number, completions in enumerate(steps):
        set_advantages(parts, completions)
        learn(parts, completions)
        left += [second_shards(engine) for engine in (policy, reference) if engine]
        refresh_reference(parts, number)
        left += [second_shards(reference)] if reference else []
        results.append(metrics.reduce() | {"targets": mesh.all_gather(list(targets))})
        targets.clear()
    weights = {name: tensor.clone() for name, tensor in policy.full_weights(2**20)}
    if "deepspeed" in cell:  # no token is trained: forward runs where the loss needs it, the optimizer does not
        for completion in steps[-1]:
            completion.is_trained = False
        learn(parts, steps[-1])
        results[-1]["second_shards"] = {"in training": max(seconds), "left": left + [second_shards(policy)]}
        results[-1]["leaves"] = len(get_z3_leaf_modules(policy.engine.module))
    for path in mesh.on_main(lambda: [Path(job["folder"], cell["name"])]):
        save_file(weights, f"{path}.safetensors")
        Path(f"{path}.json").write_text(json.dumps(results))
    policy.close()
    if reference:
        reference.close()


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    with one_rank() as mesh:
        for cell in job["cells"]:
            mesh.phase = cell["name"]
            run_cell(cell, job, mesh)


if __name__ == "__main__":
    main()
    leave(0)  # results are written; the tear-down of the interpreter now and then aborts
