"""One page of figures of one or several runs: ``spmd-rl report RUN [RUN ...]`` writes RUN/report.html.

The page is one file with everything in it: it opens without a network. Runs are compared in the same figures. Beside it
RUN/report.png has the four that say most.
"""

import argparse
import html
import io
import os
import re
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

from spmd_rl.sinks import SAMPLES, read_lines, read_metrics

PHASES = ("rollout", "reward", "gather", "reference", "old_logprobs", "train", "optimizer", "sync", "swap")
MOVES_SHOWN = 40  # of the memory timeline: the last steps
SAMPLES_SHOWN = 8  # of the first, a middle and the last step that has some
# Title -> patterns of the metrics in it; a figure that no run has anything for is left out.
OVERVIEW = ("Reward (sampled)", "Held out", "Completion length (tokens)")  # and the seconds a phase
FIGURES = {
    "Reward (sampled)": [r"reward"],
    "Rewards by function": [r"rewards/.*/mean"],
    "Held out": [r"eval/(.*/)?reward", r"eval/(.*/)?pass@\d+"],
    "Completion length (tokens)": [r"completions/(mean|max)_length"],
    "Share of truncated completions": [r"completions/clipped_ratio"],
    "Spread within groups": [r"reward_std", r"frac_reward_zero_std"],
    "KL to the reference": [r"kl"],
    "Entropy": [r"entropy"],
    "Clipped tokens": [r"clip_ratio/region_mean", r"clip_ratio/(low|high)_mean"],
    "Sampler against policy": [r"sampling/sampling_logp_difference/mean"],
    "Ratio of policy to sampler": [r"sampling/importance_sampling_ratio/(mean|min|max)"],
    "Loss": [r"loss"],
    "Gradient norm": [r"grad_norm"],
    "Learning rate": [r"learning_rate"],
    "Failed rewards": [r"rewards/.*/failed"],
    "Tokens a second": [r"perf/(rollout|train)_tokens_per_s"],
    "Model FLOP utilisation": [r"perf/mfu_\w+"],
    "Seconds a step": [r"timing/step"],
    "Lag between ranks (seconds)": [r"timing/\w+_lag"],
    "Memory by phase (GiB)": [r"memory/(rollout|train|sync)_gib"],
    "Host memory (GiB)": [r"memory/(host_used|process)_gib"],
    "Utilisation": [r"perf/(cpu|gpu)_utilization"],
}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1em; color: #222; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(30em, 1fr)); gap: 1em; }
figure { margin: 0; } figure svg { width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; margin: .5em 0 2em; }
td, th { border: 1px solid #ccc; padding: .3em .6em; text-align: left; vertical-align: top; }
td.text { white-space: pre-wrap; overflow-wrap: anywhere; font-family: ui-monospace, monospace; font-size: 13px; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
"""
Row = dict[str, Any]


@dataclass
class Run:
    """What a run has left."""

    name: str
    rows: list[Row]
    samples: list[Row]
    options: dict[str, Any]
    """section.name -> value."""
    memory: list[Row]
    """What was on the device at each change of phase."""

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Steps and values of a metric."""
        points = [(row["step"], row[name]) for row in self.rows if name in row]
        return [x for x, _ in points], [y for _, y in points]


def main(args: list[str] | None = None) -> None:
    """Write the page; exits with 2 where a run has no metrics."""
    parser = argparse.ArgumentParser(prog="spmd-rl report", description="Write a page of figures of one or several "
                                     "runs, RUN/report.html (of the first).")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("--output", help="the page, if not report.html in the first run's folder")
    given = parser.parse_args(args)
    runs = [read_run(path, name) for path, name in zip(given.runs, short_names(given.runs), strict=True)]
    path = given.output or os.path.join(given.runs[0], "report.html")
    with open(path, "w", encoding="utf-8") as file:
        file.write(page(runs))
    overview(runs, os.path.splitext(path)[0] + ".png")
    print(path)


def short_names(paths: list[str]) -> list[str]:
    """The last parts of the paths, or the paths where two share one."""
    names = [os.path.basename(os.path.abspath(path)) for path in paths]
    return names if len(set(names)) == len(names) else paths


def read_run(path: str, name: str) -> Run:
    """Metrics, samples and config of a run's folder; exits with 2 where there are no metrics."""
    metrics, samples, config = (os.path.join(path, file) for file in ("metrics.jsonl", SAMPLES, "config.yaml"))
    rows = read_metrics(metrics) if os.path.exists(metrics) else []
    if not rows:
        print(f"error: {metrics}: no metrics", file=sys.stderr)
        sys.exit(2)
    options = {}
    if os.path.exists(config):
        with open(config, encoding="utf-8") as file:
            options = {f"{section}.{key}": value for section, values in (yaml.safe_load(file) or {}).items()
                       for key, value in (values or {}).items()}
    timeline = os.path.join(path, "memory.jsonl")
    samples_found, memory = (read_lines(file) if os.path.exists(file) else [] for file in (samples, timeline))
    return Run(name, rows, samples_found, options, memory)


def page(runs: list[Run]) -> str:
    """The whole HTML page."""
    import matplotlib

    matplotlib.use("Agg")
    title = html.escape(", ".join(run.name for run in runs))
    figures = [figure for name, patterns in FIGURES.items() if (figure := curves(runs, name, patterns))]
    figures += [figure for run in runs for make in (phase_stack, memory_stack) if (figure := make(run))]
    parts = [f"<h1>{title}</h1>", summary(runs), differences(runs), "<h2>Figures</h2>",
             f'<div class="figures">{"".join(figures)}</div>', *(sample_table(run) for run in runs)]
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n")


# Tables. -------------------------------------------------------------------------------------------------------------


def summary(runs: list[Run]) -> str:
    """Steps done, rewards at both ends, seconds a step."""
    def ends(run: Run, name: str) -> str:
        values = run.series(name)[1]
        return f"{values[0]:.4g} → {values[-1]:.4g}" if values else ""

    held_out = sorted({name for run in runs for row in run.rows for name in row
                       if re.fullmatch(r"eval/(.*/)?reward", name)})
    header = ["run", "steps", "reward", *held_out, "median seconds a step", "model"]
    lines = []
    for run in runs:
        seconds = sorted(run.series("timing/step")[1])
        lines.append([run.name, str(run.rows[-1]["step"]), ends(run, "reward"), *(ends(run, name) for name in held_out),
                      f"{seconds[len(seconds) // 2]:.3g}" if seconds else "", str(run.options.get("model.path", ""))])
    return table(header, lines)


def differences(runs: list[Run]) -> str:
    """Options in which the runs differ."""
    names = sorted({name for run in runs for name in run.options if name != "run.output_dir"})
    lines = [[name, *(str(run.options.get(name, "")) for run in runs)] for name in names
             if len({str(run.options.get(name)) for run in runs}) > 1]
    return "<h2>Options that differ</h2>" + table(["option", *(run.name for run in runs)], lines) if lines else ""


def sample_table(run: Run) -> str:
    """Completions of the first, a middle and the last step that has some."""
    steps = sorted({sample["step"] for sample in run.samples})
    if not steps:
        return ""
    parts = [f"<h2>Sample completions: {html.escape(run.name)}</h2>"]
    for step in sorted({steps[0], steps[len(steps) // 2], steps[-1]}):
        samples = [sample for sample in run.samples if sample["step"] == step][:SAMPLES_SHOWN]
        lines = [[s["prompt"], s["completion"], _number(s["reward"]),
                  ", ".join(f"{name} {s['failures'].get(name, _number(r))}" for name, r in s["rewards"].items()),
                  _number(s["advantage"]), str(s["num_tokens"]), s["finish_reason"]] for s in samples]
        header = ["prompt", "completion", "reward", "by function", "advantage", "tokens", "end"]
        parts += [f"<h3>Step {step}</h3>", table(header, lines, text_columns=2)]
    return "\n".join(parts)


def table(header: list[str], lines: list[list[str]], text_columns: int = 0) -> str:
    """An HTML table; the first columns as text that keeps its white space."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f'<td class="{"text" if i < text_columns else "number"}">{_visible(cell)}</td>'
                                    for i, cell in enumerate(line)) + "</tr>" for line in lines)
    return f"<table><tr>{head}</tr>{body}</table>"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _visible(text: str) -> str:
    """Escaped; what HTML or UTF-8 cannot hold is written as its escape."""
    kept = "".join(c if c in "\n\t" or c.isprintable() or c == "\u00a0" else c.encode("unicode_escape").decode()
                   for c in text)
    return html.escape(kept)


# Figures. ------------------------------------------------------------------------------------------------------------


def curves(runs: list[Run], title: str, patterns: list[str]) -> str:
    """A figure of all metrics that match, of all runs; empty where there are none."""
    names = _names_of(runs, patterns)
    is_needed = title != "Failed rewards" or any(row.get(name) for run in runs for row in run.rows for name in names)
    if not names or not is_needed:
        return ""
    return _svg(lambda axis: _draw_curves(axis, runs, title, names), title)


def phase_stack(run: Run) -> str:
    """Seconds of the phases of each step, one upon the other; empty where there are none."""
    title = f"Seconds a phase: {run.name}"
    return _svg(lambda axis: _draw_phases(axis, run, title), title) if _phases_of(run) else ""


def memory_stack(run: Run) -> str:
    """Who is on the device over the last steps; empty where nothing says it."""
    lines = run.memory[-MOVES_SHOWN:]
    title = f"Memory timeline (GiB): {run.name}"
    return _svg(lambda axis: draw_memory(axis, lines, title), title) if lines else ""


def overview(runs: list[Run], path: str) -> None:
    """Reward, held-out accuracy, length and phase times as one PNG."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), layout="constrained")
    for axis, title in zip(axes.flat, OVERVIEW, strict=False):
        _draw_curves(axis, runs, title, _names_of(runs, FIGURES[title]))
    _draw_phases(axes.flat[-1], runs[0], f"Seconds a phase: {runs[0].name}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_memory(axis: Any, lines: list[Row], title: str) -> None:
    """Stairs of the tenants' GiB, one upon the other, below what the driver sees; a line holds until the next. What
    lies between the two is activations, caches and the CUDA context."""
    seconds = [line["time"] - lines[0]["time"] for line in lines]
    names = list(dict.fromkeys(name for line in lines for name, gib in line["tenants_gib"].items() if gib >= 0.01))
    if names:
        axis.stackplot(seconds, [[line["tenants_gib"].get(name, 0.0) for line in lines] for name in names],
                       labels=names, step="post", alpha=0.85)
    axis.step(seconds, [line["used_gib"] for line in lines], where="post", color="black", label="used, by the driver")
    before = None
    for second, line in zip(seconds, lines, strict=True):
        if line["phase"] != before:
            axis.annotate(line["phase"], (second, 0), rotation=90, fontsize="x-small", va="bottom", ha="left")
        before = line["phase"]
    axis.set_title(title)
    axis.set_xlabel("seconds")
    axis.set_ylabel("GiB")
    axis.legend(loc="best", fontsize="x-small")


def _names_of(runs: list[Run], patterns: list[str]) -> list[str]:
    """Metrics that match, in the order of the patterns."""
    return list(dict.fromkeys(name for pattern in patterns for run in runs for row in run.rows for name in row
                              if re.fullmatch(pattern, name)))


def _draw_curves(axis: Any, runs: list[Run], title: str, names: list[str]) -> None:
    for number, run in enumerate(runs):
        for style, name in enumerate(names):
            steps, values = run.series(name)
            label = " · ".join([run.name] * (len(runs) > 1) + [name] * (len(names) > 1 or len(runs) == 1))
            axis.plot(steps, values, label=label, color=f"C{(number if len(runs) > 1 else style) % 10}",
                      linestyle=["-", "--", ":", "-."][style % 4] if len(runs) > 1 else "-",
                      marker="o" if len(steps) < 25 else "", markersize=3)
    axis.set_title(title)
    axis.set_xlabel("step")
    axis.grid(alpha=0.3)
    if names:
        axis.legend(loc="best", fontsize="x-small")


def _phases_of(run: Run) -> list[str]:
    return [p for p in PHASES if any(f"timing/{p}" in row for row in run.rows if "timing/step" in row)]


def _draw_phases(axis: Any, run: Run, title: str) -> None:
    rows, shown = [row for row in run.rows if "timing/step" in row], _phases_of(run)
    if shown:
        axis.stackplot([row["step"] for row in rows], [[row.get(f"timing/{p}", 0.0) for row in rows] for p in shown],
                       labels=shown)
        axis.legend(loc="upper right", fontsize="x-small")
    axis.set_title(title)
    axis.set_xlabel("step")


def _svg(draw: Callable[[Any], None], title: str) -> str:
    """A figure as inline SVG, without the names that would repeat on the page."""
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    draw(axis)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    svg = buffer.getvalue()[buffer.getvalue().index("<svg"):]
    unique = f"f{zlib.crc32(title.encode()):x}-"
    svg = re.sub(r'id="', f'id="{unique}', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{unique}", svg)
    return f'<figure aria-label="{html.escape(title)}">{svg}</figure>'
