"""Rewrite the golden trajectories of tests/golden, with the reason why they change.

    python tools/make_golden.py --reason "dapo: the clip is two-sided now"
    python tools/make_golden.py --record --reason "the tiny model has another vocabulary"

Prints how far each loss moved from what was there. --record samples the rollouts anew, which needs the CPU engine.
"""
import argparse
import datetime
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "dist")]  # what is run is the test's own

import golden  # noqa: E402
import launching  # noqa: E402
import worker_learn  # noqa: E402


def record(folder):
    """Write rollouts.jsonl: the completions of a run with dapo's settings, one rank with the real engine."""
    from spmd_rl import checks, config, job, mesh, step

    train = launching.write_jsonl(folder / "train.jsonl", launching.make_rows(64, seed=1))
    path = launching.write_config(
        folder / "config.yaml", golden.make_model(folder / "model"), train, folder / "run",
        run={"max_steps": golden.NUM_STEPS}, rewards={"functions": [f"{ROOT}/tests/dist/golden.py:reward"]},
        rollout=golden.ROLLOUT, batch=golden.COMMON["batch"], loss=golden.COMMON["loss"] | golden.LOSSES["dapo"],
        policy=golden.COMMON["policy"] | {"optimizer": "adamw"})
    settings, _ = config.parse(["--config", str(path)])
    checks.validate(settings, 1)
    made = job.Job(settings, mesh.Mesh(settings.mesh, 1, settings.run.seed), job.load_inputs(settings, 1))
    steps = []
    for number in range(golden.NUM_STEPS):
        completions = step.sample(made.parts, number)
        for c in completions:
            c.text = ""  # bytes that are no text; nothing here reads it
            c.sampler_logprobs = [float(f"{value:.9g}") for value in c.sampler_logprobs]  # still the same fp32 number
        steps.append(completions)
        step.learn(made.parts, completions)
        step.sync(made.parts)
        print(f"step {number + 1}: reward {made.parts.metrics.reduce()['reward']:.3f}", flush=True)
    golden.FOLDER.mkdir(exist_ok=True)
    worker_learn.write_rollouts(golden.ROLLOUTS, steps)
    made.close()


def rewrite(reason):
    """Make every trajectory anew, print how far it moved, and note the reason."""
    with tempfile.TemporaryDirectory() as folder:
        found = golden.learn(Path(folder))
    moved = []
    for loss, trajectory in found.items():
        path, text = golden.path_of(loss), "new"
        if path.exists():
            steps, weights = golden.gaps(trajectory, golden.read(loss))
            text = f"moved by {max(steps):.1e} (metrics) and {weights:.1e} (weights)"
        path.write_text(json.dumps(trajectory, indent=1) + "\n")
        moved.append(f"{loss}: {text}")
        print(moved[-1])
    with open(golden.FOLDER / "README.md", "a", encoding="utf-8") as file:
        file.write(f"\n{datetime.date.today()}: {reason}\n\n" + "".join(f"- {line}\n" for line in moved))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reason", required=True, help="why they change, for tests/golden/README.md")
    parser.add_argument("--record", action="store_true", help="sample the rollouts anew too")
    args = parser.parse_args(arguments)
    if not args.reason.strip():
        parser.error("--reason is empty: say why the trajectories change")
    if args.record:
        with tempfile.TemporaryDirectory() as folder:
            record(Path(folder))
    rewrite(args.reason.strip())


if __name__ == "__main__":
    main()
