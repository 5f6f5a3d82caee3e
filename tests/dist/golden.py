"""Golden trajectories: twenty steps of the learning half on recorded rollouts, for every loss, in full precision.

tests/golden has rollouts.jsonl (a line a step), LOSS.json (metrics of each step, sums and norms of the last weights)
and README.md (when and why they were written). tools/make_golden.py writes all of it. The rollouts are those of a run
with dapo's settings; the other losses learn from them off their own policy.
"""

import json
from pathlib import Path

import launching
import worker_learn
from launching import ROOT, torchrun
from safetensors.torch import load_file

FOLDER = ROOT / "tests" / "golden"
ROLLOUTS = FOLDER / "rollouts.jsonl"
NUM_STEPS = 20
WORKER = str(ROOT / "tests" / "dist" / "worker_learn.py")
ROLLOUT = {"num_generations": 4, "max_completion_length": 8, "temperature": 0.9}
# Two passes over two mini-batches each: all but the first update of a step are off its policy. adam_epsilon is above
# the rounding of gradients that should be 0, of which AdamW else makes full steps, each CPU in its own direction.
COMMON = {"rollout": ROLLOUT, "batch": {"max_tokens_per_microbatch": 64, "num_minibatches": 2},
          "loss": {"num_iterations": 2},
          "policy": {"learning_rate": 1e-3, "lr_scheduler_type": "linear", "adam_epsilon": 1e-6,
                     "gradient_checkpointing": False}}
# Off the policy that sampled, the weights of whole completions would soon leave nothing to learn.
OFF_POLICY = {"importance_sampling_correction": False}
LOSSES = {
    "dapo": {"epsilon_high": 0.28},
    "grpo": OFF_POLICY | {"loss_type": "grpo", "beta": 0.04},
    "dr_grpo": OFF_POLICY | {"loss_type": "dr_grpo", "delta": 2.0},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0, "importance_sampling_mode": "token_truncate"},
    "sapo": {"loss_type": "sapo", "entropy_coef": 0.001, "importance_sampling_mode": "token_mask"},
    "gspo": OFF_POLICY | {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-2,
                          "epsilon_high": 4e-2},
    "gspo-token": OFF_POLICY | {"importance_sampling_level": "sequence_token", "epsilon": 3e-2, "epsilon_high": 4e-2},
}
LEFT_OUT = ("timing/", "perf/", "memory/", "targets")


def reward(completion_ids, **columns):
    """Share of a completion's ids below 64: something that twenty steps can learn from a random start."""
    return [sum(token < 64 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def make_model(folder):
    """The start of every trajectory: a tiny model with random weights."""
    return launching.make_model(folder, tied=True, sft_steps=0)


def learn(folder, losses=tuple(LOSSES), env=None):
    """Loss -> its trajectory, made anew in `folder` by one launch of one rank."""
    model = make_model(folder / "model")
    cells = [{name: COMMON.get(name, {}) | (LOSSES[loss] if name == "loss" else {}) for name in worker_learn.SECTIONS}
             | {"name": loss} for loss in losses]
    job = folder / "job.json"
    job.write_text(json.dumps(dict(model=str(model), folder=str(folder), rollouts=str(ROLLOUTS), cells=cells)))
    torchrun(1, [WORKER, str(job)], env=env).succeeded()
    return {loss: trajectory(folder / loss) for loss in losses}


def trajectory(path):
    """What of a cell's results is compared."""
    steps = [{name: value for name, value in step.items() if not name.startswith(LEFT_OUT)}
             for step in json.loads(Path(f"{path}.json").read_text())]
    weights = {name: {"sum": t.double().sum().item(), "norm": t.double().norm().item()}
               for name, t in load_file(f"{path}.safetensors").items()}
    return {"steps": steps, "weights": weights}


def path_of(loss):
    return FOLDER / f"{loss}.json"


def read(loss):
    """The golden trajectory."""
    return json.loads(path_of(loss).read_text())


def names_of(trajectory):
    """Of its metrics and weights."""
    return {name for step in trajectory["steps"] for name in step} | trajectory["weights"].keys()


def gaps(found, wanted):
    """(largest gap of a metric in each step, largest of a weight's sum or norm); absolute below magnitude 1."""
    def largest(a, b):
        assert a.keys() == b.keys(), f"other names: {sorted(a.keys() ^ b.keys())}"
        return max(abs(a[name] - b[name]) / max(1.0, abs(b[name])) for name in b)

    assert len(found["steps"]) == len(wanted["steps"]) and found["weights"].keys() == wanted["weights"].keys()
    return ([largest(a, b) for a, b in zip(found["steps"], wanted["steps"])],
            max(largest(found["weights"][name], wanted["weights"][name]) for name in wanted["weights"]))
