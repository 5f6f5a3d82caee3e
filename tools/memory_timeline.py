"""Draws who was on the GPU over a run's phases: ``memory_timeline.py RUN [--steps N] [--out PNG]``.

From RUN/memory.jsonl: resident GiB of each tenant at each change of phase, and the driver's used memory over them. What
lies between the two is activations, caches and the CUDA context.
"""

import argparse
import os
import sys

from spmd_rl.report import draw_memory
from spmd_rl.run_folder import MEMORY
from spmd_rl.sinks import read_lines


def read(run: str) -> list[dict]:
    """Lines of the timeline. Exits where there is none."""
    path = os.path.join(run, MEMORY)
    if not os.path.exists(path):
        sys.exit(f"memory_timeline.py: no {MEMORY} in {run!r}: give the folder of a run")
    return read_lines(path)


def last_steps(lines: list[dict], steps: int) -> list[dict]:
    """From the start of the last `steps` rollouts on; one has a second line where memory was freed behind it."""
    phases = ["", *(line["phase"] for line in lines)]
    starts = [i for i, (before, phase) in enumerate(zip(phases, phases[1:])) if phase == "rollout" != before]
    return lines[starts[-min(steps, len(starts))]:] if starts and steps else lines


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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9, 4.2), layout="constrained")
    draw_memory(axis, last_steps(lines, args.steps), f"Who was on the device: {args.run}")
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    figure.savefig(out, dpi=110)
    print(out)


if __name__ == "__main__":
    main()
