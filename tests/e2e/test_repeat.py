"""The same seed and layout give the same run, bit by bit, with evaluations in between or without, and an altered
sampler is said with its numbers.

Two runs with deterministic kernels, several updates a rollout, and a sampler that cuts the tail.
"""

import json
import re

import pytest
from launching import needs_cpu_engine, run, torchrun, write_config
from safetensors.torch import load_file

pytestmark = needs_cpu_engine
LEFT_OUT = ("timing/", "perf/", "memory/")
NUM_STEPS = 3


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long)])
def runs(request, model, prompts, tmp_path_factory):
    """[(folder, output)] of both, on so many ranks; the second samples held-out prompts before and after each step."""
    base = tmp_path_factory.mktemp("repeat")
    found = []
    held_out = {"eval": str(prompts / "heldout.jsonl")}
    for name, data, evaluate in (("first", {}, {}), ("second", held_out, {
            "eval_steps": 1, "num_generations": 3, "temperature": 1.0})):
        config = write_config(
            base / f"{name}.yaml", model, prompts / "train.jsonl", base / name, run={"max_steps": NUM_STEPS},
            data=data, evaluate=evaluate, mesh={"device": "cpu", "full_determinism": True},
            rollout={"top_k": 40, "resample_rounds": 1}, batch={"num_minibatches": 2},
            policy={"optimizer": "adamw", "learning_rate": 1e-3},
            loss={"num_iterations": 2, "importance_sampling_mode": "token_truncate", "top_entropy_quantile": 0.5})
        command = ["-m", "spmd_rl.train", "--config", str(config)]
        finished = run(command) if request.param == 1 else torchrun(request.param, command)
        found.append((base / name, finished.succeeded().output))
    return found


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_two_runs_are_equal_bit_by_bit(runs):
    """Every metric but seconds, speed and memory, and every weight: evaluation leaves no trace in training."""
    found = [[{name: value for name, value in line.items() if not name.startswith(LEFT_OUT)}
              for line in lines_of(folder) if "loss" in line] for folder, _ in runs]
    assert [sum("eval/pass@3" in line for line in lines_of(folder)) for folder, _ in runs] == [0, NUM_STEPS + 1]
    assert found[0] == found[1] and len(found[0]) == NUM_STEPS
    assert len({line["loss"] for line in found[0]}) == NUM_STEPS and all(line["grad_norm"] > 0 for line in found[0])
    first, second = (load_file(folder / "export" / "model.safetensors") for folder, _ in runs)
    assert first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)


def test_the_sampler_is_said_to_differ_once_with_the_numbers(runs):
    """At the start by option, after the first step with what that step measured: the mass of 40 tokens of 320, below
    1 by construction."""
    for folder, output in runs:
        first = next(line for line in lines_of(folder) if "loss" in line)
        ratio = first["sampling/importance_sampling_ratio/mean"]
        assert 0.1 < ratio < 0.999
        assert output.count("the sampler is not the policy with rollout.top_k 40: ") == 1
        said, = re.findall(r"warning: with rollout.top_k 40 the sampler is not the policy: policy over sampler is "
                           r"(\S+) a token", output)
        assert said == f"{ratio:.3g}"
