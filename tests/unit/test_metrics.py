"""Metrics: means of sums over counts, whatever the split, and what is written is what was reduced."""

import json
import math
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch

from spmd_rl.config import ConfigError, MetricsConfig
from spmd_rl.metrics import Metrics, combine, completion_metrics, lag, with_throughput
from spmd_rl.sinks import (Console, JsonLines, TensorBoard, check, make_sinks, markdown_table, read_lines,
                           read_metrics)
from spmd_rl.system import watch_gpu


@pytest.mark.parametrize("split", [[[1, 2, 3, 6]], [[1, 2], [3, 6]], [[1], [2, 3, 6]], [[], [1, 2, 3, 6]],
                                   [[1], [2], [3], [6]]])
def test_a_mean_is_the_sum_of_sums_over_the_sum_of_counts(split):
    """12 over 4 items is 3 for any split over ranks; a mean of means gives 3.5 or 2.33 for the uneven ones."""
    ranks = [({"x": (float(sum(part)), len(part))} if part else {}, {"t": float(sum(part))},
              {"m": float(max(part, default=0))}) for part in split]
    assert combine(ranks) == {"x": 3.0, "t": 12.0, "m": 6.0}


def test_a_mean_over_nothing_is_left_out():
    """No item is no number: neither 0 nor NaN."""
    assert combine([({"x": (0.0, 0), "y": (1.0, 1)}, {}, {}), ({"x": (0.0, 0)}, {}, {})]) == {"y": 1.0}


def test_ranks_need_not_have_the_same_names():
    """A rank without tokens lacks the names of the others; negative maxima stay negative."""
    found = combine([({"a": (2.0, 1)}, {}, {"m": -3.0}), ({"b": (4.0, 2)}, {"t": 1.0}, {"m": -2.0}), ({}, {}, {})])
    assert found == {"a": 2.0, "b": 2.0, "t": 1.0, "m": -2.0}


def test_reduce_adds_up_and_starts_anew(mesh):
    """Tensors and numbers of several micro-batches are one mean, one total, one maximum; then all is empty."""
    metrics = Metrics(mesh, [])
    metrics.mean("x", torch.tensor(3.0), 2)
    metrics.mean("x", torch.tensor(9.0, dtype=torch.bfloat16), 1)
    metrics.mean("y", 5, 2)
    metrics.total("loss", torch.tensor(0.25))
    metrics.total("loss", -1.0)
    metrics.maximum("m", 2.0)
    metrics.maximum("m", 1.0)
    found = metrics.reduce()
    assert found == {"x": 4.0, "y": 2.5, "loss": -0.75, "m": 2.0}
    assert all(type(value) is float for value in found.values())
    assert metrics.reduce() == {}


def test_phases_are_timed_and_named(mesh):
    """Blocks of a phase add up; inside, the mesh knows the phase, and after an error it still does."""
    metrics = Metrics(mesh, [])
    for _ in range(2):
        with metrics.timed("outer"):
            with metrics.timed("inner"):
                assert mesh.phase == "inner"
            assert mesh.phase == "outer"
    found = metrics.reduce()
    assert set(found) == {"timing/outer", "timing/inner"}
    assert found["timing/outer"] >= found["timing/inner"] >= 0
    with pytest.raises(RuntimeError):
        with metrics.timed("outer"), metrics.timed("inner"):
            raise RuntimeError
    assert mesh.phase == "inner"


def test_completion_metrics_by_hand(completion):
    """Two groups of two, lengths 1, 3, 2, 6 after prompts of 2.

    Rewards [1, 0] and [1, 1]: mean 0.75; sample std sqrt(0.5) and 0: mean 0.353553, half of the groups flat.
    """
    lengths, rewards, reasons = [1, 3, 2, 6], [1.0, 0.0, 1.0, 1.0], ["stop", "length", "stop", "stop"]
    second = [None, 0.5, None, 0.0]
    completions = []
    for i in range(4):
        made = completion([7] * lengths[i], prompt_ids=[1, 2], group=i // 2, reward=rewards[i],
                          rewards=[rewards[i], second[i]])
        made.finish_reason = reasons[i]
        completions.append(made)
    found = completion_metrics(completions, ["exact", "format"])
    assert found == pytest.approx({
        "reward": 0.75, "reward_std": 0.353553, "frac_reward_zero_std": 0.5, "completions/mean_length": 3.0,
        "completions/min_length": 1, "completions/max_length": 6, "completions/clipped_ratio": 0.25,
        "num_tokens": 20, "num_completion_tokens": 12, "rewards/exact/mean": 0.75, "rewards/exact/unscored": 0,
        "rewards/format/mean": 0.25, "rewards/format/unscored": 2, "rewards/exact/failed": 0,
        "rewards/format/failed": 0}, abs=1e-6)


def test_failures_are_counted_by_kind(completion):
    """Three of four failed on one function: two by time and one by a crash; the other function never."""
    failures = [{"math": "timeout"}, {}, {"math": "crash"}, {"math": "timeout"}]
    found = completion_metrics([completion([1], rewards=[None, 1.0], failures=f) for f in failures], ["math", "form"])
    assert {name: value for name, value in found.items() if "failed" in name} == {
        "rewards/math/failed": 3, "rewards/math/failed_by_timeout": 2, "rewards/math/failed_by_crash": 1,
        "rewards/form/failed": 0}


def test_a_reward_that_never_applies_has_no_mean(completion):
    """All None: counted as unscored, with no mean that would look like an accuracy of 0."""
    found = completion_metrics([completion([1], rewards=[None])], ["math"])
    assert found["rewards/math/unscored"] == 1 and "rewards/math/mean" not in found


def test_case_28_excluded_rows_are_counted(completion):
    """Rows that cannot be scored are left out of the mean and counted: one of two scored 1 has mean 1."""
    found = completion_metrics([completion([1], rewards=[1.0]), completion([1], rewards=[None])], ["math"])
    assert (found["rewards/math/mean"], found["rewards/math/unscored"]) == (1.0, 1)


def test_every_line_of_the_file_is_one_step(tmp_path):
    """Written and flushed step by step: what a killed run leaves is whole lines."""
    sink = JsonLines(str(tmp_path))
    sink.write(1, {"reward": 0.1 + 0.2, "kl": 1e-30})
    sink.write(2, {"reward": 1.0})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": 1, "reward": 0.1 + 0.2, "kl": 1e-30}, {"step": 2, "reward": 1.0}]
    sink.close()


def strict(text):
    """A line by JSON's own rules, which Python's reader is laxer than."""
    def refuse(name):
        raise ValueError(f"{name} is no JSON")
    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("value, name", [(math.inf, "Infinity"), (-math.inf, "-Infinity"), (math.nan, "NaN")])
def test_what_json_has_no_number_for_is_its_name(tmp_path, capsys, value, name):
    """grad_norm of a skipped step, say: every line is strict JSON, and the value comes back as a float; bare names,
    which earlier versions wrote, are read too. The other sinks take it as it is."""
    config = MetricsConfig()
    sinks = make_sinks(config, str(tmp_path), 2, 0, {})
    for sink in sinks:
        sink.write(1, {"grad_norm": value, "kl": 0.5, "rewards/exact/failed": 0})
        sink.write(2, {"grad_norm": 2.0})
        sink.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert [strict(line) for line in text.splitlines()] == [
        {"step": 1, "grad_norm": name, "kl": 0.5, "rewards/exact/failed": 0}, {"step": 2, "grad_norm": 2.0}]
    for written in (text, text.replace(f'"{name}"', name)):
        (tmp_path / "metrics.jsonl").write_text(written)
        first, second = read_metrics(str(tmp_path / "metrics.jsonl"))
        assert isinstance(first["grad_norm"], float) and repr(first["grad_norm"]) == repr(value)
        assert (first["step"], first["kl"], second) == (1, 0.5, {"step": 2, "grad_norm": 2.0})
    assert f"grad {value:.4g}" in capsys.readouterr().out
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [repr(e.value) for e in events.Scalars("grad_norm")] == [repr(value), "2.0"]


@pytest.mark.parametrize("step, bar", [(0, "." * 20), (1, "#####" + "." * 15), (4, "#" * 20)])
def test_the_console_has_a_line_a_step(capsys, step, bar):
    """Progress, time left, and the numbers that are there."""
    Console(4).write(step, {"reward": 0.5, "grad_norm": 1.25, "other": 3.0, "timing/step": 2.0})
    line = capsys.readouterr().out
    assert line.startswith(f"[{bar}] step {step}/4, ") and line.count("\n") == 1
    assert "reward 0.5" in line and "grad 1.25" in line and "other" not in line


@pytest.mark.parametrize("tensorboard", [False, True])
def test_a_run_has_its_sinks_in_its_folder(tmp_path, mesh, capsys, tensorboard):
    """metrics.jsonl always, TensorBoard where asked, and what is written to all can be read back."""
    metrics = Metrics(mesh, make_sinks(MetricsConfig(tensorboard=tensorboard), str(tmp_path), 2, 0, {}))
    metrics.write(1, {"reward": 0.5, "rewards/exact/mean": 0.25})
    metrics.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "reward": 0.5,
                                                                    "rewards/exact/mean": 0.25}
    assert (tmp_path / "tensorboard").exists() == tensorboard
    if tensorboard:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        assert [(e.step, e.value) for e in events.Scalars("rewards/exact/mean")] == [(1, 0.25)]
    assert "step 1/2" in capsys.readouterr().out


def test_the_console_shows_shares_time_left_held_out_and_failures(capsys):
    """8 steps of 450 s are left: an hour. Phases are shares of the step; failures only where there are some."""
    console = Console(10)
    console.write(2, {"timing/step": 450.0, "timing/rollout": 225.0, "timing/learn": 180.0, "eval/gsm8k/pass@4": 0.75,
                      "eval/gsm8k/rewards/math/mean": 0.5, "rewards/math/failed": 3, "rewards/form/failed": 0})
    line = capsys.readouterr().out
    assert "step 2/10, 1:00:00 left" in line and "450 s (rollout 50%, learn 40%)" in line
    assert "held-out gsm8k/pass@4 0.75" in line and "math FAILED 3 times" in line
    assert "form" not in line and "rewards/" not in line


def test_lag_is_the_slowest_ranks_time_less_the_fastests():
    """Rollouts of 2, 5 and 3 s, rewards of 4, 0 and none: lags 3 and 4, and rank 0 is the slowest with 6 s in all."""
    ranks = [{"timing/rollout": 2.0, "timing/reward": 4.0}, {"timing/rollout": 5.0, "timing/reward": 0.0},
             {"timing/rollout": 3.0}]
    assert lag(ranks) == {"timing/rollout_lag": 3.0, "timing/reward_lag": 4.0, "timing/slowest_rank": 0}
    assert lag(ranks[:1]) == {}


def test_the_machines_load_is_among_a_steps_metrics(mesh):
    """Resident memory of this process by another way of asking, and shares between 0 and 1."""
    metrics = Metrics(mesh, [])
    deadline = time.monotonic() + 0.2
    while time.monotonic() < deadline:
        pass
    metrics.add_system()
    used = psutil.virtual_memory()
    found = metrics.reduce()
    assert found["memory/process_gib"] == pytest.approx(psutil.Process().memory_info().rss / 2**30, rel=0.05)
    assert 0 < found["perf/cpu_utilization"] <= 1
    # Other processes may come and go between the two readings.
    assert found["memory/host_used_gib"] == pytest.approx((used.total - used.available) / 2**30, rel=0.5)


class Nvml:
    """As much of pynvml as is used: the driver knows one device, busy at 20 % and then 60 %."""

    class NVMLError(Exception):
        pass

    def __init__(self, known):
        self.known, self.readings = known, [20, 60]

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != self.known:
            raise self.NVMLError("not found")
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle):
        if not self.readings:
            raise self.NVMLError("not supported")
        return SimpleNamespace(gpu=self.readings.pop(0))


@pytest.mark.parametrize("known", ["GPU-1-2", "GPU-other", None])
def test_a_gpus_load_is_asked_of_the_driver(monkeypatch, known):
    """The mean of its readings; no metric and no error where the driver does not know it or pynvml is not there."""
    monkeypatch.setitem(sys.modules, "pynvml", known and Nvml(known))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid="1-2"))
    monkeypatch.setattr("spmd_rl.system.GPU_SAMPLE_S", 0.01)
    watch = watch_gpu(torch.device("cuda", 0))
    if known != "GPU-1-2":
        assert watch is None
        return
    deadline = time.monotonic() + 10
    while watch._fault is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert watch.read() == {"perf/gpu_utilization": pytest.approx(0.4)} and watch.read() == {}


NASTY = "a|b\n<think>\ud800\x00 \u2028 `c` \\\\ \U0001f600"


@pytest.mark.parametrize("every, steps", [(0, []), (1, [1, 2, 3, 4]), (3, [1, 3]), (10, [1])])
def test_sample_completions_are_written_when_due(tmp_path, mesh, completion, tokenizer, every, steps):
    """At the first step and every so many; prompts as the model got them, texts byte for byte, all rewards."""
    config = MetricsConfig(completions_steps=every, num_completions=2, tensorboard=False)
    metrics = Metrics(mesh, make_sinks(config, str(tmp_path), 4, 0, {}), config)
    completions = [completion([1, 2], prompt_ids=tokenizer("hi")["input_ids"], text=NASTY, rewards=[1.0, None],
                              reward=1.0, failures={"math": "timeout"}, sample=i, advantage=0.5) for i in range(3)]
    for step in range(1, 5):
        metrics.samples(step, completions, tokenizer, ["form", "math"])
    metrics.close()
    path = tmp_path / "completions.jsonl"
    rows = read_lines(str(path)) if path.exists() else []
    assert [row["step"] for row in rows] == [step for step in steps for _ in range(2)]
    assert all(row | {"step": 0, "sample": 0} == {
        "step": 0, "group": 0, "sample": 0, "prompt": "hi", "completion": NASTY, "num_tokens": 2,
        "finish_reason": "stop", "reward": 1.0, "rewards": {"form": 1.0, "math": None},
        "failures": {"math": "timeout"}, "advantage": 0.5} for row in rows)


def test_a_run_that_goes_on_drops_the_samples_of_later_steps(tmp_path):
    """Steps 1 and 2 are kept by a run that goes on after step 2; a cut-off line goes."""
    lines = [json.dumps({"step": step}) for step in (1, 2, 3)]
    (tmp_path / "completions.jsonl").write_text("\n".join(lines) + '\n{"step": 1')
    JsonLines(str(tmp_path), 2).close()
    assert read_lines(str(tmp_path / "completions.jsonl")) == [{"step": 1}, {"step": 2}]


def test_the_table_of_samples_is_one_line_a_sample(tmp_path):
    """Bars, tags and line ends of a text do not break the table; TensorBoard takes it."""
    sample = {"prompt": NASTY, "completion": "x" * 5000, "reward": None, "advantage": 0.25}
    table = markdown_table([sample, sample])
    assert len(table.split("\n")) == 4 and "<think>" not in table and "a\\|b<br>&lt;think>" in table
    assert "x" * 2000 + " …" in table and "x" * 2001 not in table
    board = TensorBoard(str(tmp_path), 0)
    board.write_samples(1, [sample])
    board.close()


def test_wandb_offline_has_metrics_and_samples(tmp_path, mesh, completion, tokenizer, monkeypatch):
    """A run under the run's folder, without a network or an account."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = MetricsConfig(wandb="offline", tensorboard=False, completions_steps=1)
    metrics = Metrics(mesh, make_sinks(config, str(tmp_path), 2, 0, {"run": {"seed": 3}}), config)
    metrics.write(0, {"eval/reward": 0.25})
    metrics.samples(1, [completion([1], text="x", rewards=[1.0], reward=1.0)], tokenizer, ["form"])
    metrics.write(1, {"reward": 0.5})
    metrics.write(1, {"eval/reward": 0.75})
    metrics.close()
    record, = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 120
    while b"eval/reward" not in (data := record.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.2)  # a process of the library's own writes it
    assert b"eval/reward" in data and b"completions" in data and b"seed" in data


def test_mlflow_has_metrics_and_options(tmp_path, mesh, monkeypatch):
    """A store of its own: every metric at its step, the options as parameters."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # else a data base, which the skinny package has not
    store = f"file:{tmp_path}/store"
    config = MetricsConfig(mlflow=store, tensorboard=False)
    options = {"policy": {f"option_{i}": i for i in range(150)}}
    metrics = Metrics(mesh, make_sinks(config, str(tmp_path), 2, 0, options), config)
    metrics.write(1, {"eval/pass@4": 0.25, "rewards/exact/mean": 0.5})
    metrics.write(2, {"rewards/exact/mean": 0.75})
    metrics.close()
    client = mlflow.MlflowClient(store)
    run, = client.search_runs([client.get_experiment_by_name("spmd_rl").experiment_id])
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "rewards/exact/mean")] == [
        (1, 0.5), (2, 0.75)]
    assert run.data.metrics["eval/pass_at_4"] == 0.25 and run.data.params["policy.option_149"] == "149"
    assert run.info.status == "FINISHED"


@pytest.mark.parametrize("field, module", [("wandb", "wandb"), ("mlflow", "mlflow")])
def test_a_sink_whose_extra_is_missing_says_what_to_install(monkeypatch, field, module):
    """ConfigError with the pip command, before anything is loaded."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"metrics.{field} is .*pip install 'spmd-rl\[{module}\]'"):
        check(MetricsConfig(**{field: "offline"}))


def test_all_metrics_of_a_step_cost_little(tmp_path, mesh, completion, tokenizer):
    """Collecting, reducing and writing 60 metrics, a table of samples every tenth step: below 1 % of a step of a second
    (the median of 50; the quickstart's steps take about that on two cores). Counted as this thread's processor time:
    the tests beside it take the cores by turns, and the clock on the wall would count their turns too."""
    metrics = Metrics(mesh, make_sinks(MetricsConfig(), str(tmp_path), 60, 0, {}))
    completions = [completion([1] * 100, text="x" * 300, rewards=[1.0], reward=1.0) for _ in range(512)]
    seconds = []
    for step in range(1, 51):
        start = time.thread_time()
        for name in range(50):
            metrics.mean(f"name/{name}", torch.tensor(1.0), 3)
        with metrics.timed("step"), metrics.timed("rollout"):
            pass
        metrics.samples(step, completions, tokenizer, ["form"])
        metrics.add_system()
        metrics.write(step, metrics.reduce())
        seconds.append(time.thread_time() - start)
    metrics.close()
    print(f"{1000 * sorted(seconds)[25]:.2f} ms a step")
    assert sorted(seconds)[25] < 0.01, sorted(seconds)


def test_a_mean_that_is_not_finite_is_shown():
    """NaN in a sum stays NaN: hiding it would hide a broken step."""
    assert math.isnan(combine([({"x": (float("nan"), 2)}, {}, {})])["x"])


@pytest.mark.parametrize("values, largest", [
    ([1.0, math.nan, 2.0], math.nan), ([math.nan, 1.0], math.nan), ([1.0, math.nan], math.nan),
    ([1.0, math.inf, 2.0], math.inf), ([-math.inf, -1.0], -1.0), ([-math.inf], -math.inf)])
def test_a_maximum_that_is_not_finite_is_shown(mesh, values, largest):
    """Of the updates of a step, and of the ranks, in any order: Python's max would drop a NaN that is not the first."""
    metrics = Metrics(mesh, [])
    for value in values:
        metrics.maximum("grad_norm", value)
    assert repr(metrics.reduce()["grad_norm"]) == repr(largest)
    assert repr(combine([({}, {}, {"grad_norm": value}) for value in values])["grad_norm"]) == repr(largest)


def test_throughput_is_tokens_over_the_phases_time():
    """300 sampled tokens in 1.5 s, 500 in all learnt in 2 s; a phase that did not run has no rate."""
    metrics = {"num_completion_tokens": 300, "num_tokens": 500, "timing/rollout": 1.5, "timing/train": 2.0}
    found = with_throughput(metrics)
    assert (found["perf/rollout_tokens_per_s"], found["perf/train_tokens_per_s"]) == (200, 250)
    assert "perf/train_tokens_per_s" not in with_throughput({**metrics, "timing/train": 0.0})


def test_mfu_is_operations_over_time_ranks_and_peak():
    """800 TFLOP executed by 2 ranks in 2 s: 200 TFLOP/s a rank, a fifth of a peak of 1000; perceived 1200 give 300. No
    peak, no MFU; no training, no rate."""
    metrics = {"perf/train_executed_tflop": 800, "perf/train_perceived_tflop": 1200, "timing/train": 2.0,
               "num_tokens": 1}
    found = with_throughput(metrics, 2, 1000)
    assert (found["perf/executed_tflops"], found["perf/perceived_tflops"]) == (200, 300)
    assert (found["perf/mfu_executed"], found["perf/mfu_perceived"]) == (0.2, 0.3)
    assert "perf/mfu_executed" not in with_throughput(metrics, 2) and "perf/executed_tflops" in with_throughput(metrics)
    assert "perf/executed_tflops" not in with_throughput({**metrics, "timing/train": 0.0}, 2, 1000)
