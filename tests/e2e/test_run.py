"""A whole run from the command line: what it leaves behind, and that the number of ranks changes none of it.

Three runs of the same config: one rank by plain python, two ranks, two ranks as one engine at ZeRO-3.
"""

import json
import os
import re

import pytest
import torch
import yaml
from launching import needs_cpu_engine, run, torchrun, write_config
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

pytestmark = needs_cpu_engine
NUM_STEPS = 3
LEFT_OUT = ("timing/", "perf/", "memory/")  # what "equal metrics" does not compare
LEAKS = ("destroy_process_group", "leaked", "resource_tracker", "Traceback", "atexit")
STEP_METRICS = {
    "reward", "reward_std", "frac_reward_zero_std", "rewards/exact_match/mean", "rewards/regex/mean", "kl", "entropy",
    "loss",
    "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "completions/mean_length",
    "completions/min_length", "completions/max_length", "completions/clipped_ratio", "grad_norm", "learning_rate",
    "sampling/sampling_logp_difference/mean", "sampling/importance_sampling_ratio/mean", "num_tokens",
}
STEP_TIMES = {"timing/step", "timing/rollout", "timing/reward", "timing/learn", "timing/train", "timing/sync"}
EVAL_METRICS = {"eval/reward", "eval/rewards/exact_match/mean", "eval/completions/mean_length",
                "eval/completions/clipped_ratio"}
KINDS = ["plain", "two ranks", "one engine of two"]


class Run:
    def __init__(self, finished, folder):
        self.output, self.folder = finished.output, folder
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        self.evaluations = [line for line in lines if "eval/reward" in line]
        self.steps = [line for line in lines if "loss" in line]
        self.num_lines = len(lines)


@pytest.fixture(scope="module")
def runs(model, prompts, tmp_path_factory):
    """The three runs by kind; the later ones take the first one's resolved config."""
    base = tmp_path_factory.mktemp("runs")
    folders = {kind: base / kind.replace(" ", "-") for kind in KINDS}
    config = write_config(
        base / "config.yaml", model, prompts / "train.jsonl", folders["plain"],
        run={"max_steps": NUM_STEPS}, data={"eval": str(prompts / "heldout.jsonl")}, loss={"beta": 0.1},
        rewards={"functions": ["exact_match", "regex"], "regex_pattern": "^[0-4]"},
        evaluate={"eval_steps": 2}, checkpoint={"export_steps": 2})
    program = ["-m", "spmd_rl.train"]
    found = {"plain": Run(run([*program, "--config", str(config)]).succeeded(), folders["plain"])}
    again = [*program, "--config", str(folders["plain"] / "config.yaml"), "--run.output_dir"]
    found["two ranks"] = Run(
        torchrun(2, [*again, str(folders["two ranks"])]).succeeded(), folders["two ranks"])
    found["one engine of two"] = Run(
        torchrun(2, [*again, str(folders["one engine of two"]), "--rollout.tensor_parallel_size", "2",
                     "--policy.zero_stage", "3"]).succeeded(), folders["one engine of two"])
    return found


@pytest.fixture(params=KINDS)
def finished_run(request, runs):
    return runs[request.param]


def test_metrics_file_has_the_names(finished_run):
    """metrics.jsonl: a line a step with the published names, evaluations before, at step 2, and after; all finite."""
    assert [line["step"] for line in finished_run.steps] == [1, 2, 3]
    assert [line["step"] for line in finished_run.evaluations] == [0, 2, 3]
    assert finished_run.num_lines == 6
    for line in finished_run.steps:
        assert STEP_METRICS | STEP_TIMES <= line.keys(), STEP_METRICS | STEP_TIMES - line.keys()
        assert all(isinstance(value, (int, float)) and abs(value) < 1e9 for value in line.values())
        assert any(name.startswith("memory/") for name in line) and any(name.startswith("perf/") for name in line)
    for line in finished_run.evaluations:
        assert EVAL_METRICS <= line.keys()


def test_phases_fit_into_the_step(finished_run):
    """No phase takes longer than its step: start-up and evaluation are not among them.

    Each is the slowest rank's, and not the same rank for all: their sum may exceed the slowest rank's step.
    """
    for line in finished_run.steps:
        for phase in ("rollout", "reward", "learn", "sync"):
            assert line[f"timing/{phase}"] <= line["timing/step"], f"step {line['step']}, {phase}"


def test_phases_of_one_rank_add_up_to_no_more_than_its_step(runs):
    """With one rank all are the same rank's, and the sum holds."""
    for line in runs["plain"].steps:
        phases = ("rollout", "reward", "learn", "sync")
        assert sum(line[f"timing/{phase}"] for phase in phases) <= line["timing/step"], f"step {line['step']}"


def test_first_step_identities(finished_run):
    """At step 1 ratio is 1 exactly (old log-probs are the current ones), KL at most 1e-6 and the sampler's log-probs
    are the policy's to 1e-5; later the KL is above 0 and the sampler still agrees."""
    first, *later = finished_run.steps
    assert first["ratio"] == 1.0
    assert first["kl"] <= 1e-6
    for line in finished_run.steps:
        assert line["sampling/sampling_logp_difference/mean"] <= 1e-5
        assert line["grad_norm"] > 0
    assert all(line["kl"] > 1e-6 for line in later)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_metrics_do_not_depend_on_ranks(runs, kind):
    """Every metric but seconds, speed and memory is the one of the plain run to 1e-5, and so is the accuracy."""
    def compared(lines):
        return [{name: value for name, value in line.items() if not name.startswith(LEFT_OUT)} for line in lines]

    for found, wanted in ((runs[kind].steps, runs["plain"].steps),
                          (runs[kind].evaluations, runs["plain"].evaluations)):
        for line, want in zip(compared(found), compared(wanted), strict=True):
            assert line.keys() == want.keys()
            different = {name: (value, want[name]) for name, value in line.items()
                         if value != pytest.approx(want[name], rel=1e-5, abs=1e-5)}
            assert not different, f"step {line['step']}: (found, wanted) {different}"


@pytest.mark.parametrize("kind", KINDS[1:])
def test_exported_weights_do_not_depend_on_ranks(runs, kind):
    """The export is the plain run's to 1e-5 of each tensor's largest value."""
    found, wanted = (load_file(runs[k].folder / "export" / "model.safetensors") for k in (kind, "plain"))
    for name, tensor in wanted.items():
        gap = float((found[name] - tensor).abs().max()) / max(1.0, float(tensor.abs().max()))
        assert gap <= 1e-5, f"{name} differs by {gap:.1e}"


@pytest.mark.parametrize("name", ["export", "export-2"])
def test_export_is_a_model_folder(finished_run, model, name):
    """Keys, shapes and dtypes are the source's; plain Transformers loads it without a missing or unexpected key, with
    tokenizer and generation config. The weights moved, and the last export is not the earlier one."""
    folder = finished_run.folder / name
    found, source = load_file(folder / "model.safetensors"), load_file(model / "model.safetensors")
    assert {key: (t.shape, t.dtype) for key, t in found.items()} == {k: (t.shape, t.dtype) for k, t in source.items()}
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert loaded.dtype == torch.float32 and loaded.config.dtype == torch.float32
    assert all(torch.equal(tensor, found[key]) for key, tensor in loaded.state_dict().items() if key in found)
    tokenizer, own = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(model)
    assert tokenizer.get_vocab() == own.get_vocab() and tokenizer.eos_token_id == own.eos_token_id
    assert tokenizer.chat_template == own.chat_template
    wanted = GenerationConfig.from_pretrained(model)
    assert GenerationConfig.from_pretrained(folder).eos_token_id == wanted.eos_token_id == 257
    assert any(not torch.equal(tensor, source[key]) for key, tensor in found.items())
    other = load_file(finished_run.folder / ("export-2" if name == "export" else "export") / "model.safetensors")
    assert any(not torch.equal(tensor, other[key]) for key, tensor in found.items())


def test_exported_config_is_the_sources(finished_run, model):
    """config.json says what the source's says: whoever generates with the export does so as with the source."""
    found = json.loads((finished_run.folder / "export" / "config.json").read_text())
    assert found == json.loads((model / "config.json").read_text())


def test_summary_and_folder(finished_run):
    """summary.json has accuracy before and after (that of the evaluations), seconds and steps; nothing half-written is
    left, and the folder is its owner's alone."""
    summary = json.loads((finished_run.folder / "summary.json").read_text())
    accuracies = [line["eval/rewards/exact_match/mean"] for line in finished_run.evaluations]
    assert summary["accuracy_before"] == accuracies[0] and summary["accuracy_after"] == accuracies[-1]
    assert summary["steps"] == NUM_STEPS and 0 < summary["train_seconds"] < 120
    assert {entry.name for entry in finished_run.folder.iterdir()} == {
        "config.yaml", "metrics.jsonl", "memory.jsonl", "completions.jsonl", "summary.json", "tensorboard", "export",
        "export-2"}
    assert os.stat(finished_run.folder).st_mode & 0o777 == 0o700


def test_tensorboard_has_the_same_numbers(finished_run):
    """Each metric of each step is a scalar of the event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished_run.folder / "tensorboard"))
    events.Reload()
    for name in finished_run.steps[0].keys() - {"step"}:
        scalars = {event.step: event.value for event in events.Scalars(name)}
        assert scalars == pytest.approx({line["step"]: line[name] for line in finished_run.steps if name in line},
                                        rel=1e-6)


def test_resolved_config_is_complete(runs):
    """config.yaml holds every section and the values in force; the later runs were made from it with two options over
    it, and their own differs in those alone."""
    configs = {kind: yaml.safe_load((runs[kind].folder / "config.yaml").read_text()) for kind in KINDS}
    assert configs["plain"]["loss"]["beta"] == 0.1 and configs["plain"]["rollout"]["top_p"] == 1.0
    wanted = configs["plain"]
    wanted["run"]["output_dir"] = str(runs["one engine of two"].folder)
    wanted["rollout"]["tensor_parallel_size"] = 2
    wanted["policy"]["zero_stage"] = 3
    assert configs["one engine of two"] == wanted


def test_console_and_clean_end(finished_run):
    """The console has a line a step once, where the files are, and no word of leaked groups or semaphores."""
    for step in range(1, NUM_STEPS + 1):
        assert len(re.findall(rf"step {step}/{NUM_STEPS}, .*reward", finished_run.output)) >= 1
        assert len(re.findall(rf"step {step}/{NUM_STEPS}, .*grad", finished_run.output)) == 1
    assert f"the run's files: {finished_run.folder}" in finished_run.output
    for word in LEAKS:
        assert word not in finished_run.output, [line for line in finished_run.output.splitlines() if word in line]
