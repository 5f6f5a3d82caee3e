"""A run that is killed, stopped by a signal and resumed is the uninterrupted run, bit by bit.

Ten prompts and four a step: epochs end in the middle of steps. Two ranks; the run is killed in step 4, stopped in step
5 and goes on from there, against a run of seven steps at once; a copy goes on with one rank at another ZeRO stage (in
the long tier: test_saved_state has such moves without an engine).
"""

import json
import os
import shutil

import pytest
import torch
from launching import ROOT, make_rows, needs_cpu_engine, run, script, torchrun, write_config, write_jsonl
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from spmd_rl import run_folder

pytestmark = needs_cpu_engine
REWARD = str(ROOT / "tests" / "e2e" / "interrupting.py") + ":reward"
LOADS = str(ROOT / "tests" / "e2e" / "worker_loads.py")
NUM_STEPS = 7
LEFT_OUT = ("timing/", "perf/", "memory/")
STAGES = [2, pytest.param(3, marks=pytest.mark.long), pytest.param(0, marks=pytest.mark.long)]


def rows_of(folder):
    """All lines of metrics.jsonl without what differs between any two runs."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(LEFT_OUT)} for line in lines]


class Runs:
    def __init__(self, base, model, stage):
        rows = make_rows(14, seed=3)
        train, held_out = write_jsonl(base / "train.jsonl", rows[:10]), write_jsonl(base / "eval.jsonl", rows[10:])
        self.folders = {name: base / name for name in ("straight", "stopped", "moved")}
        self.config = write_config(
            base / "config.yaml", model, train, self.folders["straight"], run={"max_steps": NUM_STEPS},
            data={"eval": str(held_out)}, rewards={"functions": [REWARD], "num_workers": 0}, evaluate={"eval_steps": 3},
            policy={"zero_stage": stage, "optimizer": "adamw", "learning_rate": 3e-3, "lr_scheduler_type": "linear",
                    "warmup_steps": 2}, checkpoint={"save_steps": 1})
        self.finished = {"straight": self.start("straight").succeeded()}
        # Call 1 is the evaluation before the first step, call 5 the one after the third.
        self.finished["killed"] = self.start("stopped", "6:1:KILL")
        self.after_kill = (rows_of(self.folders["stopped"]), self.checkpoints())
        # From here on saves are written beside the steps.
        arguments = ["--config", str(self.config), "--run.output_dir", str(self.folders["stopped"]),
                     "--checkpoint.background", "true"]
        self.finished["stopped"] = script(["launch/torchrun.sh", *arguments], env={
            "RANKS": "2", "INTERRUPT": "2:1:USR1", "AGAIN": "TERM", "CUDA_VISIBLE_DEVICES": ""})
        self.after_stop = (rows_of(self.folders["stopped"]), self.checkpoints())
        shutil.copytree(self.folders["stopped"], self.folders["moved"])
        self.finished["resumed"] = self.start("stopped", "0:0:TERM", "--checkpoint.background", "true").succeeded()
        self.other_stage = "3" if stage < 3 else "1"

    def checkpoints(self):
        return [path.rpartition("/")[2] for path in run_folder.checkpoints(str(self.folders["stopped"]))]

    def start(self, name, interrupt="0:0:TERM", *options):
        return torchrun(2, ["-m", "spmd_rl.train", "--config", str(self.config), "--run.output_dir",
                            str(self.folders[name]), *options], env={"INTERRUPT": interrupt})


@pytest.fixture(scope="module", params=STAGES, ids=lambda stage: f"zero{stage}")
def runs(request, model, tmp_path_factory):
    """All runs at one ZeRO stage."""
    return Runs(tmp_path_factory.mktemp("resume"), model, request.param)


def test_case_62_metrics_are_those_of_the_uninterrupted_run(runs):
    """Every line, evaluations and learning rates among them, to the last bit: nothing twice, nothing left out."""
    assert rows_of(runs.folders["stopped"]) == rows_of(runs.folders["straight"])
    assert len(rows_of(runs.folders["straight"])) == NUM_STEPS + 4


def test_weights_are_those_of_the_uninterrupted_run(runs):
    """The exports are equal bit by bit."""
    found, wanted = (load_file(runs.folders[name] / "export" / "model.safetensors") for name in ("stopped", "straight"))
    assert found.keys() == wanted.keys()
    assert all(found[name].equal(wanted[name]) for name in wanted)


def test_case_58_a_killed_run_leaves_whole_checkpoints(runs):
    """Killed in step 4: the checkpoints of steps 2 and 3 are there, the others were rotated out."""
    rows, checkpoints = runs.after_kill
    assert runs.finished["killed"].returncode != 0
    assert checkpoints == ["step-3", "step-2"] and rows[-1]["step"] == 3
    assert "goes on from" in runs.finished["stopped"].output
    assert "checkpoints/step-3" in runs.finished["stopped"].output


def test_a_signal_to_one_rank_ends_all_after_the_step(runs):
    """Noted in step 5, on one rank only: the step is finished, saved, and every rank and the launcher leave with 75.
    SIGTERM to each rank and to the launcher in the middle of that save, and SIGUSR2, change nothing."""
    output = runs.finished["stopped"].output
    assert runs.after_stop[1][0] == "step-5" and runs.after_stop[0][-1]["step"] == 5
    assert "SIGUSR1: the run ends after this step" in output and f"ended after step 5 of {NUM_STEPS}" in output
    assert output.count("TERM to ") >= 4 and output.count("the run ends after this step") == 2  # once a rank
    assert runs.finished["stopped"].returncode == 75, output
    assert "Traceback" not in output and "failed in phase" not in output


def test_summary_counts_the_whole_run(runs):
    """Accuracy before is that of before the first step, and the seconds are those of all parts."""
    found, wanted = (json.loads((runs.folders[name] / "summary.json").read_text()) for name in ("stopped", "straight"))
    assert found.pop("train_seconds") > 0 and wanted.pop("train_seconds") > 0
    assert found == wanted and found["steps"] == NUM_STEPS


def test_tensorboard_has_each_step_once(runs):
    """The scalars of the interrupted run are the lines of its metrics.jsonl."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(runs.folders["stopped"] / "tensorboard")).Reload()
    wanted = {row["step"]: row["reward"] for row in rows_of(runs.folders["stopped"]) if "reward" in row}
    assert {event.step: event.value for event in events.Scalars("reward")} == pytest.approx(wanted, rel=1e-6)
    assert len(events.Scalars("reward")) == NUM_STEPS


@pytest.mark.long
@pytest.mark.parametrize("name", ["TERM", "INT", "USR1", "USR2"])
@pytest.mark.parametrize("whom", ["self", "parent"])
def test_every_signal_stops_the_run(runs, tmp_path, name, whom):
    """To one rank, or to the launcher in the middle of a step: 75, a whole checkpoint of that step, no traceback."""
    finished = script(["launch/torchrun.sh", "--config", str(runs.config), "--run.output_dir", str(tmp_path / "run")],
                      env={"RANKS": "2", "INTERRUPT": f"3:0:{name}:{whom}", "CUDA_VISIBLE_DEVICES": ""})
    assert finished.returncode == 75 and "Traceback" not in finished.output, finished.output
    newest = run_folder.checkpoints(str(tmp_path / "run"))[0]
    assert newest.endswith("step-2") and run_folder.fault(newest) is None


@pytest.mark.long
def test_the_time_limit_stops_the_run(runs, tmp_path):
    """run.max_train_minutes that is over before the first step ends: 75 before any step, with nothing to save."""
    finished = script(["launch/torchrun.sh", "--config", str(runs.config), "--run.output_dir", str(tmp_path / "run"),
                       "--run.max_train_minutes", "0.01"], env={"RANKS": "2", "CUDA_VISIBLE_DEVICES": ""})
    assert finished.returncode == 75, finished.output
    assert "run.max_train_minutes 0.01: ended after step 0" in finished.output
    assert run_folder.checkpoints(str(tmp_path / "run")) == []


@pytest.mark.long
def test_case_66_one_rank_goes_on_where_two_were_at_another_stage(runs):
    """Steps 6 and 7 on one rank at another ZeRO stage are those of two ranks: what is told before them is the same to
    the bit, their learning rates too, and the other metrics to 1e-5."""
    finished = run(["-m", "spmd_rl.train", "--config", str(runs.config), "--run.output_dir", str(runs.folders["moved"]),
                    "--policy.zero_stage", runs.other_stage]).succeeded()
    found, wanted = rows_of(runs.folders["moved"]), rows_of(runs.folders["straight"])
    done = next(number for number, row in enumerate(found) if row["step"] == 6)
    assert found[:done] == wanted[:done] and len(found) == len(wanted)
    for row, want in zip(found[done:], wanted[done:], strict=True):
        assert row.keys() == want.keys() and row.get("learning_rate") == want.get("learning_rate")
        assert row == pytest.approx(want, rel=1e-5, abs=1e-5)
    assert "checkpoints/step-5" in finished.output


def test_a_checkpoint_exports_what_the_run_exports(runs, tmp_path):
    """`spmd-rl export RUN` has the tensors, the config and the tokenizer's files of the run's own export, byte by
    byte."""
    command = ["-c", "from spmd_rl.cli import main; main()", "export", str(runs.folders["stopped"]), "--output",
               str(tmp_path / "out")]
    finished = run(command, timeout_s=120).succeeded()
    own = runs.folders["stopped"] / "export"
    assert finished.output.strip().endswith(str(tmp_path / "out"))
    assert sorted(os.listdir(tmp_path / "out")) == sorted(os.listdir(own))
    for name in os.listdir(own):
        assert (tmp_path / "out" / name).read_bytes() == (own / name).read_bytes(), name


def test_case_61_vllm_and_transformers_load_an_export_alike(runs):
    """Plain vLLM and plain Transformers have the same log-probs of fixed tokens, to 1e-5."""
    path = str(runs.folders["stopped"] / "export")
    ids = list(range(40, 60))
    sampled = json.loads(run([LOADS, path, json.dumps(ids)], timeout_s=120).succeeded().output.splitlines()[-1])
    with torch.no_grad():
        logits_SV = AutoModelForCausalLM.from_pretrained(path)(torch.tensor([ids])).logits[0].log_softmax(-1)
    wanted = [float(logits_SV[position, token]) for position, token in enumerate(ids[1:])]
    assert sampled == pytest.approx(wanted, abs=1e-5) and max(wanted) < 0


@pytest.mark.long
def test_another_config_is_refused_by_its_fields(runs):
    """The folder of a run is not mixed with another's: the differing fields are named with both values."""
    finished = run(["-m", "spmd_rl.train", "--config", str(runs.config), "--run.output_dir",
                    str(runs.folders["stopped"]), "--run.seed", "8", "--run.max_steps", "9"], timeout_s=60)
    assert finished.returncode == 2, finished.output
    assert "run.seed 0 there, 8 here" in finished.output and "max_steps" not in finished.output
