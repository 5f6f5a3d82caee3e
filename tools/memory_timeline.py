"""Draws who was on the GPU over a run's phases: ``memory_timeline.py RUN [--steps N] [--out PNG]``.

From RUN/memory.jsonl: resident GiB of each tenant at each change of phase, and the driver's used memory over them. What
lies between the two is activations, caches and the CUDA context.
"""

import argparse
import json
import os
import sys

MEMORY = "memory.jsonl"


def read(run: str) -> list[dict]:
    """Lines of the timeline. Exits where there is none."""
    path = os.path.join(run, MEMORY)
    if not os.path.exists(path):
        sys.exit(f"memory_timeline.py: no {MEMORY} in {run!r}: give the folder of a run")
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def last_steps(lines: list[dict], steps: int) -> list[dict]:
    """From the start of the last `steps` rollouts on."""
    starts = [i for i, line in enumerate(lines) if line["phase"] == "rollout"]
    return lines[starts[-min(steps, len(starts))]:] if starts and steps else lines


def draw(lines: list[dict], out: str) -> None:
    """Steps of a stair: a line holds until the next."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    start = lines[0]["time"]
    times = [line["time"] - start for line in lines]
    names = [name for name in dict.fromkeys(n for line in lines for n in line["tenants_gib"])
             if max(line["tenants_gib"].get(name, 0.0) for line in lines) >= 0.01]
    figure, axes = pyplot.subplots(figsize=(9, 4.2), layout="constrained")
    axes.stackplot(times, [[line["tenants_gib"].get(name, 0.0) for line in lines] for name in names], labels=names,
                   step="post", alpha=0.85)
    axes.step(times, [line["used_gib"] for line in lines], where="post", color="black", label="used, by the driver")
    for time, line in zip(times, lines):
        axes.axvline(time, color="grey", linewidth=0.4)
        axes.text(time, axes.get_ylim()[1], line["phase"], rotation=60, fontsize=7, va="bottom")
    axes.set_xlabel("seconds")
    axes.set_ylabel("GiB on the device")
    axes.set_xlim(0, times[-1] or 1)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="a run's folder")
    parser.add_argument("--steps", type=int, default=3, help="last steps drawn; 0 is all")
    parser.add_argument("--out", help="PNG; RUN/memory.png if absent")
    args = parser.parse_args()
    lines = read(args.run)
    if not lines:
        sys.exit(f"memory_timeline.py: {MEMORY} in {args.run!r} has no line yet")
    out = args.out or os.path.join(args.run, "memory.png")
    draw(last_steps(lines, args.steps), out)
    print(out)


if __name__ == "__main__":
    main()
