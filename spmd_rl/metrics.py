"""Metrics of a step: collected on every rank, reduced once, written by one."""

import contextlib
import glob
import json
import os
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from spmd_rl.advantages import group_spread
from spmd_rl.batch import Completion
from spmd_rl.config import MetricsConfig
from spmd_rl.mesh import Mesh


class Sink(Protocol):
    """Where a step's metrics go."""

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """One step's, or one evaluation's."""

    def close(self) -> None:
        """No more follows."""


class Metrics:
    """Collects values between two calls of `reduce`."""

    def __init__(self, mesh: Mesh, sinks: Sequence[Sink]) -> None:
        self._mesh, self._sinks = mesh, sinks
        self._sums: dict[str, list[Any]] = {}
        self._totals: dict[str, Any] = {}
        self._maxima: dict[str, float] = {}
        self._seconds: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Seconds of a phase, as timing/<phase>; several blocks of a phase add up."""
        outer, self._mesh.phase = self._mesh.phase, phase
        start = time.perf_counter()
        yield
        if self._mesh.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # a phase's kernels are its time; copies may go on behind it
        self._seconds[f"timing/{phase}"] += time.perf_counter() - start
        self._mesh.phase = outer  # not after an error: its message names the phase it happened in

    def mean(self, name: str, total: Tensor | float, count: int) -> None:
        """Add to a mean over items of all ranks and micro-batches; a tensor stays on its device until `reduce`."""
        entry = self._sums.setdefault(name, [0.0, 0])
        entry[0] = entry[0] + total
        entry[1] += count

    def maximum(self, name: str, value: float) -> None:
        """Keep the largest of all ranks."""
        self._maxima[name] = max(value, self._maxima.get(name, value))

    def total(self, name: str, value: Tensor | float) -> None:
        """Add to a sum over all ranks and micro-batches."""
        self._totals[name] = self._totals.get(name, 0.0) + value

    def reduce(self) -> dict[str, float]:
        """All ranks' values as one number each, and start anew. Collective; ranks need not have the same names."""
        numbers = _to_host([*(total for total, _ in self._sums.values()), *self._totals.values()])
        sums = {name: (numbers.pop(0), count) for name, (_, count) in self._sums.items()}
        totals = {name: numbers.pop(0) for name in self._totals}
        maxima = self._maxima | self._seconds
        self._sums, self._totals, self._maxima, self._seconds = {}, {}, {}, defaultdict(float)
        return combine(self._mesh.all_gather((sums, totals, maxima)))

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """To every sink (there are some on one rank only)."""
        for sink in self._sinks:
            sink.write(step, metrics)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()


def _to_host(values: Sequence[Tensor | float]) -> list[float]:
    """As floats, with one copy from the device for all tensors."""
    tensors = [v.detach().double() for v in values if isinstance(v, Tensor)]
    copied = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(copied) if isinstance(v, Tensor) else float(v) for v in values]


Reported = tuple[dict[str, tuple[float, int]], dict[str, float], dict[str, float]]


def combine(ranks: Sequence[Reported]) -> dict[str, float]:
    """One number a name from each rank's (sums with counts, totals, maxima).

    A mean is the sum of sums over the sum of counts, never a mean of means; one over nothing is left out.
    """
    sums: dict[str, tuple[float, int]] = {}
    totals: dict[str, float] = {}
    largest: dict[str, float] = {}
    for their_sums, their_totals, their_maxima in ranks:
        for name, (total, count) in their_sums.items():
            before = sums.get(name, (0.0, 0))
            sums[name] = (before[0] + total, before[1] + count)
        for name, value in their_totals.items():
            totals[name] = totals.get(name, 0.0) + value
        for name, value in their_maxima.items():
            largest[name] = max(value, largest.get(name, value))
    return {name: total / count for name, (total, count) in sums.items() if count} | totals | largest


def completion_metrics(completions: Sequence[Completion], reward_names: Sequence[str]) -> dict[str, float]:
    """TRL's names, over the whole step's completions (at least one)."""
    lengths = [len(c.token_ids) for c in completions]
    spread = list(group_spread([c.reward for c in completions], [c.group for c in completions]).values())
    metrics = {
        "reward": _mean([c.reward for c in completions if c.reward is not None]),
        "reward_std": _mean(spread),
        "frac_reward_zero_std": _mean([s == 0 for s in spread]),
        "completions/mean_length": _mean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": _mean([c.finish_reason == "length" for c in completions]),
        "num_tokens": sum(c.num_tokens for c in completions),
        "num_completion_tokens": sum(lengths),
    }
    for i, name in enumerate(reward_names):
        scored = [r for c in completions if (r := c.rewards[i]) is not None]
        failures = [c.failures[name] for c in completions if name in c.failures]
        metrics[f"rewards/{name}/failed"] = len(failures)
        for failure in sorted(set(failures)):
            metrics[f"rewards/{name}/failed_by_{failure}"] = failures.count(failure)
        metrics[f"rewards/{name}/unscored"] = len(completions) - len(scored)
        if scored:
            metrics[f"rewards/{name}/mean"] = _mean(scored)
    return metrics


def with_throughput(metrics: dict[str, float]) -> dict[str, float]:
    """A step's metrics with tokens a second of all ranks: sampled ones by the rollout's time, those of prompts and
    completions by forward and backward's."""
    rates = {"perf/rollout_tokens_per_s": ("num_completion_tokens", "timing/rollout"),
             "perf/train_tokens_per_s": ("num_tokens", "timing/train")}
    return metrics | {name: metrics[tokens] / metrics[seconds] for name, (tokens, seconds) in rates.items()
                      if metrics.get(seconds)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


class JsonLines:
    """metrics.jsonl: one object a line, with `step`; a line is whole on disk or absent."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", encoding="utf-8")  # a run that goes on has the lines up to there already

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Scalars as TensorBoard events; those of steps after `steps_done` that are there already are superseded."""

    def __init__(self, folder: str, steps_done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if not steps_done:
            for old in glob.glob(os.path.join(folder, "events.out.tfevents.*")):
                os.remove(old)  # of a run that ended in its first steps
        self._writer = SummaryWriter(folder, purge_step=steps_done + 1 if steps_done else None)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Console:
    """A line a step: progress, time left, and what tells a healthy run from a sick one."""

    SHOWN = {"reward": "reward", "eval/reward": "held-out reward", "completions/mean_length": "length",
             "entropy": "entropy", "kl": "kl", "grad_norm": "grad", "sampling/sampling_logp_difference/mean": "gap",
             "timing/rollout": "rollout s", "timing/learn": "learn s", "timing/sync": "sync s", "timing/step": "step s"}
    BAR_WIDTH = 20

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._step_seconds: deque[float] = deque(maxlen=20)  # the last ones: the first few compile

    def write(self, step: int, metrics: dict[str, float]) -> None:
        if "timing/step" in metrics:
            self._step_seconds.append(metrics["timing/step"])
        filled = self.BAR_WIDTH * step // self._max_steps
        left = "starting"
        if self._step_seconds:
            left_s = round(statistics.median(self._step_seconds) * (self._max_steps - step))
            left = f"{left_s // 60}:{left_s % 60:02d} left"
        shown = "  ".join(f"{label} {metrics[name]:.4g}" for name, label in self.SHOWN.items() if name in metrics)
        print(f"[{'#' * filled}{'.' * (self.BAR_WIDTH - filled)}] step {step}/{self._max_steps}, {left}  {shown}",
              flush=True)

    def close(self) -> None:
        """Nothing is open."""


def make_sinks(config: MetricsConfig, output_dir: str, max_steps: int, steps_done: int = 0) -> list[Sink]:
    """The sinks of a run, in its folder; steps_done: where a run that goes on stands."""
    sinks: list[Sink] = [JsonLines(os.path.join(output_dir, "metrics.jsonl")), Console(max_steps)]
    if config.tensorboard:
        sinks.append(TensorBoard(os.path.join(output_dir, "tensorboard"), steps_done))
    return sinks
