"""Metrics: means of sums over counts, whatever the split, and what is written is what was reduced."""

import json
import math

import pytest
import torch

from spmd_rl.config import MetricsConfig
from spmd_rl.metrics import Metrics, as_samples, combine, completion_metrics, lag, with_throughput
from spmd_rl.sinks import Console, JsonLines, TensorBoard, check, make_sinks, markdown_table, read_lines


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


def test_a_mean_that_is_not_finite_is_shown():
    """NaN in a sum stays NaN: hiding it would hide a broken step."""
    assert math.isnan(combine([({"x": (float("nan"), 2)}, {}, {})])["x"])


def test_throughput_is_tokens_over_the_phases_time():
    """300 sampled tokens in 1.5 s, 500 in all learnt in 2 s; a phase that did not run has no rate."""
    metrics = {"num_completion_tokens": 300, "num_tokens": 500, "timing/rollout": 1.5, "timing/train": 2.0}
    found = with_throughput(metrics)
    assert (found["perf/rollout_tokens_per_s"], found["perf/train_tokens_per_s"]) == (200, 250)
    assert "perf/train_tokens_per_s" not in with_throughput({**metrics, "timing/train": 0.0})
