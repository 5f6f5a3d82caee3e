"""Metrics of a step: collected on every rank, reduced once, written by one."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from spmd_rl.advantages import group_spread
from spmd_rl.batch import Completion
from spmd_rl.config import MetricsConfig
from spmd_rl.mesh import Mesh
from spmd_rl.sinks import Sample, Sink
from spmd_rl.system import System

OWN_PHASES = ("rollout", "reward")  # in which a rank waits for no other: how far apart they end is lag


class Metrics:
    """Collects values between two calls of `reduce`."""

    def __init__(self, mesh: Mesh, sinks: Sequence[Sink], config: MetricsConfig | None = None) -> None:
        self._mesh, self._sinks, self._config = mesh, sinks, config or MetricsConfig()
        self._system = System(mesh.device)
        self._sums: dict[str, list[Any]] = {}
        self._totals: dict[str, Any] = {}
        self._maxima: dict[str, float] = {}
        self._seconds: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Seconds of a phase, as timing/<phase>; several blocks of a phase add up."""
        outer, self._mesh.phase = self._mesh.phase, phase
        start = time.perf_counter()
        with torch.profiler.record_function(phase):
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
        self._maxima[name] = _larger(value, self._maxima.get(name, value))

    def total(self, name: str, value: Tensor | float) -> None:
        """Add to a sum over all ranks and micro-batches."""
        self._totals[name] = self._totals.get(name, 0.0) + value

    def reduce(self) -> dict[str, float]:
        """All ranks' values as one number each, and start anew. Collective; ranks need not have the same names."""
        numbers = _to_host([*(total for total, _ in self._sums.values()), *self._totals.values()])
        sums = {name: (numbers.pop(0), count) for name, (_, count) in self._sums.items()}
        totals = {name: numbers.pop(0) for name in self._totals}
        seconds, maxima = dict(self._seconds), self._maxima | self._seconds
        self._sums, self._totals, self._maxima, self._seconds = {}, {}, {}, defaultdict(float)
        found = self._mesh.all_gather((sums, totals, maxima, seconds))
        return combine([rank[:3] for rank in found]) | lag([rank[3] for rank in found])

    def add_system(self) -> None:
        """What this rank's machine does; the largest of all ranks counts."""
        for name, value in self._system.read().items():
            self.maximum(name, value)

    def samples(self, step: int, completions: Sequence[Completion], tokenizer: Any,
                reward_names: Sequence[str]) -> None:
        """Write some of the step's (from 1) completions where it is due."""
        every = self._config.completions_steps
        if every and (step == 1 or step % every == 0):
            for sink in self._sinks:
                sink.write_samples(step, as_samples(completions[:self._config.num_completions], tokenizer,
                                                    reward_names))

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
            largest[name] = _larger(value, largest.get(name, value))
    return {name: total / count for name, (total, count) in sums.items() if count} | totals | largest


def _larger(a: float, b: float) -> float:
    """NaN where one is: max would keep it or not by their order."""
    return a if a >= b or a != a else b


def lag(ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """From each rank's seconds: how much longer the slowest rank takes than the fastest, and which one it is."""
    if len(ranks) == 1:
        return {}
    metrics = {}
    for phase in OWN_PHASES:
        seconds = [rank.get(f"timing/{phase}", 0.0) for rank in ranks]
        metrics[f"timing/{phase}_lag"] = max(seconds) - min(seconds)
    total = [sum(rank.get(f"timing/{phase}", 0.0) for phase in OWN_PHASES) for rank in ranks]
    return metrics | {"timing/slowest_rank": total.index(max(total))}


def as_samples(completions: Sequence[Completion], tokenizer: Any, reward_names: Sequence[str]) -> list[Sample]:
    """What a reader wants to see of completions; prompts as the model got them, after the template."""
    return [{"group": c.group, "sample": c.sample, "prompt": tokenizer.decode(c.prompt_ids), "completion": c.text,
             "num_tokens": len(c.token_ids), "finish_reason": c.finish_reason, "reward": c.reward,
             "rewards": dict(zip(reward_names, c.rewards, strict=True)), "failures": c.failures,
             "advantage": c.advantage} for c in completions]


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


def with_throughput(metrics: dict[str, float], num_ranks: int = 1, peak_tflops: float = 0.0) -> dict[str, float]:
    """A step's metrics with rates.

    Tokens a second of all ranks: sampled ones by the rollout's time, those of prompts and completions by forward and
    backward's. TFLOP/s of one rank in forward and backward, and those over the device's peak (MFU) where that is known:
    executed, and perceived, which counts what copies of the prompts would need without recomputation.
    """
    rates = {"perf/rollout_tokens_per_s": ("num_completion_tokens", "timing/rollout"),
             "perf/train_tokens_per_s": ("num_tokens", "timing/train")}
    found = {name: metrics[tokens] / metrics[seconds] for name, (tokens, seconds) in rates.items()
             if metrics.get(seconds)}
    for kind in ("executed", "perceived"):
        if metrics.get("timing/train") and f"perf/train_{kind}_tflop" in metrics:
            rate = metrics[f"perf/train_{kind}_tflop"] / metrics["timing/train"] / num_ranks
            found[f"perf/{kind}_tflops"] = rate
            if peak_tflops:
                found[f"perf/mfu_{kind}"] = rate / peak_tflops
    return metrics | found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
