"""The same seed and layout give the same run, bit by bit, with evaluations in between or without; its recorded rollouts
give the same updates without an engine; an altered sampler is said with its numbers.

Two runs with deterministic kernels, several updates a rollout, and a sampler that cuts the tail.
"""

import json
import re

import pytest
from launching import needs_cpu_engine, run, torchrun, write_config
from safetensors.torch import load_file

from spmd_rl.recording import recorded_steps
from spmd_rl.train import main

pytestmark = needs_cpu_engine
LEFT_OUT = ("timing/", "perf/", "memory/")
SAMPLED = ("reward", "epoch", "frac_", "completions/", "num_", "resampling/")  # what the update did not compute
NUM_STEPS = 3


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long)])
def launch(request):
    """A function from the program's options to a finished run, on so many ranks."""
    def start(options):
        command = ["-m", "spmd_rl.train", *options]
        return (run(command) if request.param == 1 else torchrun(request.param, command)).succeeded()

    return start


@pytest.fixture(scope="module")
def runs(launch, model, prompts, tmp_path_factory):
    """[(folder, output)] of both. The first keeps its rollouts, the second samples held-out prompts
    before and after each step."""
    base = tmp_path_factory.mktemp("repeat")
    found = []
    held_out = {"eval": str(prompts / "heldout.jsonl")}
    for name, data, evaluate in (("first", {}, {}), ("second", held_out, {
            "eval_steps": 1, "num_generations": 3, "temperature": 1.0})):
        config = write_config(
            base / f"{name}.yaml", model, prompts / "train.jsonl", base / name,
            run={"max_steps": NUM_STEPS, "record_rollouts": name == "first"},
            data=data, evaluate=evaluate, mesh={"device": "cpu", "full_determinism": True},
            rollout={"top_k": 40, "resample_rounds": 1}, batch={"num_minibatches": 2},
            policy={"optimizer": "adamw", "learning_rate": 1e-3},
            loss={"beta": 0.1, "num_iterations": 2, "importance_sampling_mode": "token_truncate",
                  "top_entropy_quantile": 0.5})
        found.append((base / name, launch(["--config", str(config)]).output))
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


def test_a_recorded_run_is_replayed(runs, launch, tmp_path, capsys):
    """Without the engine: the same updates, to 1e-6; into a folder of its own alone."""
    folder, _ = runs[0]
    assert len(recorded_steps(str(folder / "rollouts"))) == NUM_STEPS
    again = ["--config", str(folder / "config.yaml"), "--run.record_rollouts", "false", "--replay",
             str(folder / "rollouts")]
    with pytest.raises(SystemExit) as refused:
        main(again)
    assert refused.value.code == 2 and "run.output_dir" in capsys.readouterr().err
    launch([*again, "--run.output_dir", str(tmp_path / "again")])
    for line, want in zip(lines_of(tmp_path / "again"), lines_of(folder), strict=True):
        learned = {name for name in want if not name.startswith((*LEFT_OUT, *SAMPLED))}
        assert {"loss", "grad_norm", "kl", "entropy"} <= learned <= line.keys()
        for name in learned:
            assert line[name] == pytest.approx(want[name], rel=1e-6, abs=1e-6), name


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
