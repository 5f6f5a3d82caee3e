"""A run's figures from its metrics.jsonl: ``spmd-rl report RUN`` writes RUN/report.png."""

import argparse
import json
import os
import sys
from typing import Any

PHASES = ("rollout", "reward", "reference", "train", "optimizer", "sync", "swap")


def main(args: list[str] | None = None) -> None:
    """Draw the figure of each named run; exits with 2 where one has no metrics."""
    parser = argparse.ArgumentParser(prog="spmd-rl report", description="Draw a run's figures as RUN/report.png.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    for run in parser.parse_args(args).runs:
        path = os.path.join(run, "metrics.jsonl")
        rows = read_metrics(path) if os.path.exists(path) else []
        if not rows:
            print(f"error: {path}: no metrics", file=sys.stderr)
            sys.exit(2)
        print(draw(rows, os.path.join(run, "report.png")))


def read_metrics(path: str) -> list[dict[str, float]]:
    """The rows of a metrics.jsonl; a last line that was cut off is left out."""
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def draw(rows: list[dict[str, float]], path: str) -> str:
    """Reward, held-out accuracy, length and phase times over the steps; returns `path`, a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), layout="constrained")
    _curve(axes[0, 0], rows, {"reward": "reward (sampled)"}, "reward")
    _curve(axes[0, 1], rows, {"eval/reward": "held-out (greedy)"}, "held-out reward", marker="o")
    _curve(axes[1, 0], rows, {"completions/mean_length": "mean", "completions/max_length": "longest"},
           "completion length (tokens)")
    _phases(axes[1, 1], rows)
    for axis in axes.flat:
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _series(rows: list[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    points = [(row["step"], row[name]) for row in rows if name in row]
    return [x for x, _ in points], [y for _, y in points]


def _curve(axis: Any, rows: list[dict[str, float]], names: dict[str, str], title: str, marker: str = "") -> None:
    for name, label in names.items():
        axis.plot(*_series(rows, name), label=label, marker=marker)
    axis.set_title(title)
    axis.legend(loc="best")


def _phases(axis: Any, rows: list[dict[str, float]]) -> None:
    shown = [p for p in PHASES if _series(rows, f"timing/{p}")[0]]
    if shown:
        steps = _series(rows, "timing/step")[0]
        times = [[row.get(f"timing/{p}", 0.0) for row in rows if "timing/step" in row] for p in shown]
        axis.stackplot(steps, times, labels=shown)
        axis.legend(loc="upper right", fontsize="small")
    axis.set_title("seconds a phase")
