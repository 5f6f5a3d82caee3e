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
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "dist")]  # what is run is the test's own

import golden  # noqa: E402
import launching  # noqa: E402
import worker_learn  # noqa: E402


def record(folder):
    """Write rollouts.jsonl: what a run with dapo's settings, one rank with the real engine, learned from."""
    from spmd_rl import step, train

    prompts = launching.write_jsonl(folder / "train.jsonl", launching.make_rows(64, seed=1))
    config = launching.write_config(
        folder / "config.yaml", golden.make_model(folder / "model"), prompts, folder / "run",
        run={"max_steps": golden.NUM_STEPS}, rewards={"functions": [f"{ROOT}/tests/dist/golden.py:reward"]},
        rollout=golden.ROLLOUT, batch=golden.COMMON["batch"], loss=golden.COMMON["loss"] | golden.LOSSES["dapo"],
        policy=golden.COMMON["policy"] | {"optimizer": "adamw"})
    steps, learn = [], step.learn

    def kept(parts, completions):
        # Without texts, which are bytes here; nine digits are enough for the same fp32 number.
        steps.append([replace(c, text="", sampler_logprobs=[float(f"{value:.9g}") for value in c.sampler_logprobs])
                      for c in completions])
        learn(parts, completions)

    step.learn = kept
    train.main(["--config", str(config)])
    step.learn = learn
    golden.FOLDER.mkdir(exist_ok=True)
    worker_learn.write_rollouts(golden.ROLLOUTS, steps)


def how_far(loss, trajectory):
    """From what is there."""
    if not golden.path_of(loss).exists():
        return "new"
    before = golden.read(loss)
    names = golden.names_of(trajectory) ^ golden.names_of(before)
    if names:
        return f"not to be compared, {', '.join(sorted(names))} came or went"
    steps, weights = golden.gaps(trajectory, before)
    return f"moved by {max(steps):.1e} (metrics) and {weights:.1e} (weights)"


def rewrite(reason):
    """Make every trajectory anew, print how far it moved, and note the reason."""
    with tempfile.TemporaryDirectory() as folder:
        found = golden.learn(Path(folder))
    moved = [f"{loss}: {how_far(loss, trajectory)}" for loss, trajectory in found.items()]
    print("\n".join(moved))
    for loss, trajectory in found.items():
        golden.path_of(loss).write_text(json.dumps(trajectory, indent=1) + "\n")
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
