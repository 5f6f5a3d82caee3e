"""The learning half alone on recorded rollouts, on any number of ranks. test_repeat.py has a real run's."""

import json
import random

import pytest
from launching import Once, run, torchrun, write_config

from spmd_rl.batch import Completion
from spmd_rl.recording import Recorder

LEFT_OUT = ("timing/", "perf/", "memory/", "reward", "sampling/is_", "epoch", "frac_", "completions/", "num_")
NUM_STEPS = 3
PROGRAM = ["-m", "spmd_rl.train"]


def steps_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def learned(line):
    """What a step's update computed."""
    return {name: value for name, value in line.items() if not name.startswith(LEFT_OUT)}


def made_up_steps(folder):
    """Groups of random tokens, ragged, one completion empty."""
    draw, recorder = random.Random(0), Recorder(str(folder))
    for step in range(NUM_STEPS):
        completions = []
        for group in range(4):
            prompt = [draw.randrange(256) for _ in range(8 + 5 * group)]
            for sample in range(4):
                ids = [draw.randrange(256) for _ in range(0 if (group, sample) == (1, 2) else draw.randrange(1, 9))]
                completions.append(Completion(group, sample, prompt, ids, [-5.0] * len(ids), "stop", step,
                                              rewards=[float(sample)], reward=float(sample), advantage=sample - 1.5))
        recorder.write(step, completions)
    return folder


@pytest.fixture(scope="module")
def replayed(model, tmp_path_factory):
    """A function from (ranks, ZeRO stage, shared prompts[, options of the policy]) to the steps' metrics, made once
    each."""
    base = tmp_path_factory.mktemp("replays")
    rollouts = made_up_steps(base / "rollouts")

    def launch(num_ranks, stage, shared_prompt, options=()):
        folder = base / f"{num_ranks}-{stage}-{shared_prompt}-{len(options)}"
        config = write_config(base / f"{folder.name}.yaml", model, base / "none.jsonl", folder,
                              run={"max_steps": NUM_STEPS}, loss={"beta": 0.1, "importance_sampling_correction": False},
                              policy={"zero_stage": stage} | dict(options), batch={"shared_prompt": shared_prompt})
        arguments = [*PROGRAM, "--config", str(config), "--replay", str(rollouts)]
        (torchrun(num_ranks, arguments) if num_ranks > 1 else run(arguments)).succeeded()
        return steps_of(folder)

    return Once(launch)


SPEED = (("compile_layers", True), ("gradient_checkpointing", True), ("gradient_checkpointing_every", 2))


@pytest.mark.parametrize("layout", [(1, 3, True, SPEED), *(
    pytest.param(layout, marks=pytest.mark.long) for layout in ((2, 3, "auto"), (1, 2, "auto"), (1, 2, True, SPEED),
                                                                (2, 3, True, SPEED)))])
def test_layout_changes_no_replay(replayed, layout):
    """No engine, no data: losses, norms and entropies of copies on one rank, also with shared prompts, sharded, and
    with compiled layers and some blocks computed again."""
    standard, found = replayed(1, 0, False), replayed(*layout)
    assert [line["step"] for line in found] == [1, 2, 3]
    for line, want in zip(found, standard, strict=True):
        assert learned(line).keys() == learned(want).keys()
        assert {"loss", "grad_norm", "kl", "entropy"} <= learned(line).keys()
        for name, value in learned(want).items():
            assert line[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert found[1]["kl"] > 0


def test_sharing_saves_operations(replayed):
    """The metrics count what was executed, and what copies would have needed."""
    shared, copies = replayed(1, 3, True, SPEED)[0], replayed(1, 0, False)[0]
    assert shared["perf/train_executed_tflop"] < copies["perf/train_executed_tflop"]
    assert shared["perf/train_perceived_tflop"] == pytest.approx(copies["perf/train_perceived_tflop"])
    assert shared["perf/executed_tflops"] == pytest.approx(
        shared["perf/train_executed_tflop"] / shared["timing/train"])
    assert shared["perf/load_max_over_mean"] == 1 and copies["perf/compilations"] == 0
    assert "perf/mfu_executed" not in shared  # a CPU's peak is not known


def test_nothing_is_compiled_after_the_first_steps(replayed):
    """Rows of other sizes take the layers that are compiled already, with DeepSpeed's hooks on every module too."""
    first, *_, last = (line["perf/compilations"] for line in replayed(1, 3, True, SPEED))
    assert first > 0 and last == 0
