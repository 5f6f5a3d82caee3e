"""One rank of test_layout.py: learns fixed completions in many cells, with the real policy and no engine.

    torchrun --nproc_per_node N worker_learn.py JOB.json

JOB.json has `model`, `folder` and `cells`. For each cell the folder gets NAME.json (one entry an optimizer step)
and NAME.safetensors (the weights after all steps).
"""

import json
import random
import sys
from pathlib import Path

from safetensors.torch import save_file

from spmd_rl.batch import Completion
from spmd_rl.config import (BatchConfig, Config, LossConfig, MeshConfig, ModelConfig, PolicyConfig, RolloutConfig,
                            RunConfig)
from spmd_rl.mesh import Mesh, leave
from spmd_rl.metrics import Metrics
from spmd_rl.model import load_hf_config
from spmd_rl.policy import Policy, Reference
from spmd_rl.step import Parts, learn, set_advantages

LEARNING_RATE = 1.0
MAX_GRAD_NORM = 0.5
MAX_LENGTH = 16
TEMPERATURE = 0.7

# Each step: (group, reward, tokens of the prompt, tokens of the completion).
RAGGED = [(0, 1.0, 5, 9), (0, 0.0, 5, 2), (0, 0.25, 5, 16), (0, 0.0, 5, 1),
          (1, 1.0, 3, 4), (1, 1.0, 3, 7), (1, 1.0, 3, 3), (1, 1.0, 3, 12),  # a flat group: advantage 0, still counted
          (2, 0.0, 11, 6), (2, 1.0, 11, 5), (2, 1.0, 11, 8)]
FEW = [(0, 1.0, 4, 6), (0, 0.0, 4, 0)]  # one completion with tokens: from 2 ranks on, one rank trains nothing
STEPS = [RAGGED, FEW]


def completions_of(step, vocabulary=256):
    """The same completions in every process."""
    draw = random.Random(len(step))
    prompt_ids = {group: [draw.randrange(vocabulary) for _ in range(length)] for group, _, length, _ in step}
    made = []
    for place, (group, reward, _, length) in enumerate(step):
        ids = [draw.randrange(vocabulary) for _ in range(length)]
        made.append(Completion(group, place, prompt_ids[group], ids, [-1.0] * length, "length", 0, reward=reward))
    return made


def run_cell(cell, model, folder, mesh):
    config = Config(
        run=RunConfig(max_steps=len(STEPS)), model=ModelConfig(path=model, dtype=cell["dtype"]),
        rollout=RolloutConfig(temperature=TEMPERATURE, max_completion_length=MAX_LENGTH),
        batch=BatchConfig(max_tokens_per_microbatch=cell["budget"]),
        # The completions' sampler log-probs are made up: nothing is weighed by them.
        loss=LossConfig(loss_type=cell["loss_type"], beta=cell["beta"], importance_sampling_correction=False,
                        use_bias_correction_kl=False),
        policy=PolicyConfig(zero_stage=cell["stage"], optimizer="sgd", learning_rate=LEARNING_RATE,
                            max_grad_norm=MAX_GRAD_NORM))
    metrics = Metrics(mesh, [])
    policy = Policy(config, mesh, load_hf_config(config.model))
    reference = Reference(config, mesh, load_hf_config(config.model)) if cell["beta"] else None
    parts = Parts(config=config, mesh=mesh, metrics=metrics, tokenizer=None, sampler=None, rewards=None, rollout=None,
                  policy=policy, reference=reference, weight_sync=None, memory=None)
    targets = []
    forward_backward = policy.forward_backward

    def counted(micro_batches, loss):
        targets.append([mb.num_targets for mb in micro_batches])
        forward_backward(micro_batches, loss)

    policy.forward_backward = counted
    results = []
    for step in STEPS:
        completions = completions_of(step)
        set_advantages(parts, completions)
        learn(parts, completions)
        results.append(metrics.reduce() | {"targets": mesh.all_gather(targets.pop())})
    weights = {name: tensor.clone() for name, tensor in policy.full_weights(2**20)}
    for path in mesh.on_main(lambda: [Path(folder, cell["name"])]):
        save_file(weights, f"{path}.safetensors")
        Path(f"{path}.json").write_text(json.dumps(results))
    policy.close()
    if reference:
        reference.close()


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    mesh = Mesh(MeshConfig(device="cpu", timeout_s=60), 1, 0)
    try:
        for cell in job["cells"]:
            mesh.phase = cell["name"]
            run_cell(cell, job["model"], job["folder"], mesh)
    except BaseException as error:
        mesh.fail(error)
    mesh.leave_together()
    mesh.close()


if __name__ == "__main__":
    main()
    leave(0)  # results are written; the tear-down of the interpreter now and then aborts
