"""Train the quickstart's task with every loss and its recommended settings; draw the curves into docs/algorithms.md.

    bash launch/quickstart.sh                          # makes model and prompts
    python tools/learning_curves.py runs/losses        # two CPU ranks, some minutes a loss
    python tools/learning_curves.py runs/losses --losses gspo

A loss whose run is whole in the folder is not run again. The page gets a table and docs/learning_curves.png once all
losses are there. Exits with 1 where one gains less than 80 % of what the default does.
"""
import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from spmd_rl.sinks import read_metrics  # noqa: E402

DATA = ROOT / "data" / "quickstart"
PAGE, PICTURE = ROOT / "docs" / "algorithms.md", "learning_curves.png"
BEGIN, END = "<!-- written by tools/learning_curves.py -->", "<!-- to here -->"
ACCURACY = "eval/rewards/exact_match/mean"
DEFAULT = "dapo"
LEAST_SHARE = 0.8  # of the default's gain
TWO_UPDATES = {"batch.num_minibatches": 2}  # else every ratio is 1, and the loss the default's but for its weights
LOSSES = {
    "dapo": {},
    "grpo": {"loss.loss_type": "grpo"},
    "dr_grpo": {"loss.loss_type": "dr_grpo", "advantages.scale_rewards": "none"},
    "cispo": {"loss.loss_type": "cispo", "loss.epsilon_high": 5.0} | TWO_UPDATES,
    "sapo": {"loss.loss_type": "sapo"} | TWO_UPDATES,
    "gspo": {"loss.loss_type": "grpo", "loss.importance_sampling_level": "sequence", "loss.epsilon": 3e-4,
             "loss.epsilon_high": 4e-4} | TWO_UPDATES,
}


def train(loss, folder, args):
    """Run it on two ranks, unless its run is whole there."""
    if (folder / "summary.json").exists():
        return
    options = {"model.path": args.model, "data.train": args.train, "data.eval": args.heldout,
               "run.output_dir": folder, "checkpoint.resume": "never"} | LOSSES[loss]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m",
               "spmd_rl.train", "--config", str(ROOT / "launch" / "configs" / "quickstart.yaml")]
    subprocess.run(command + [text for name, value in options.items() for text in (f"--{name}", str(value))],
                   cwd=ROOT, check=True)


def curve(folder):
    """[(step, held-out accuracy)]."""
    return [(int(row["step"]), row[ACCURACY]) for row in read_metrics(str(folder / "metrics.jsonl")) if ACCURACY in row]


def table(curves):
    """The page's rows, and the losses that gained too little."""
    default_gain = curves[DEFAULT][-1][1] - curves[DEFAULT][0][1]
    lines, short = ["| loss | over `launch/configs/quickstart.yaml` | held-out accuracy | gain | of the default's |",
                    "|---|---|---|---|---|"], []
    for loss, points in curves.items():
        gain = points[-1][1] - points[0][1]
        settings = ", ".join(f"`{name}: {value:g}`" if isinstance(value, float) else f"`{name}: {value}`"
                             for name, value in LOSSES[loss].items()) or "nothing"
        lines.append(f"| {loss} | {settings} | {points[0][1]:.3f} → {points[-1][1]:.3f} | {100 * gain:+.1f} points | "
                     f"{100 * gain / default_gain:.0f} % |")
        if gain < LEAST_SHARE * default_gain:
            short.append(loss)
    return lines, short


def draw(curves, path):
    """Held-out accuracy over the steps, a line a loss."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for loss, points in curves.items():
        axis.plot(*zip(*points), label=loss, marker="o", linewidth=2.5 if loss == DEFAULT else 1.2)
    axis.set(xlabel="step", ylabel="held-out accuracy (greedy)")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def write_page(lines, page):
    """Put the table and the picture between the page's two marks."""
    text = page.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{page} must have {BEGIN} and {END} once each")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    middle = "\n".join(["", *lines, "", f"![held-out accuracy of every loss]({PICTURE})", ""])
    page.write_text(before + BEGIN + middle + END + after, encoding="utf-8")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the runs, a folder a loss")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--model", type=Path, default=DATA / "model", help="starting model")
    parser.add_argument("--train", type=Path, default=DATA / "train-0.jsonl")
    parser.add_argument("--heldout", type=Path, default=DATA / "heldout-0.jsonl")
    args = parser.parse_args(arguments)
    for path in (args.model, args.train, args.heldout):
        if not path.exists():
            parser.error(f"{path} is not there: run launch/quickstart.sh, which makes it")
    for loss in args.losses:
        train(loss, args.folder / loss, args)
    missing = [loss for loss in LOSSES if not (args.folder / loss / "summary.json").exists()]
    if missing:
        print(f"no whole run yet of {', '.join(missing)}: the page stays as it is")
        return 0
    curves = {loss: curve(args.folder / loss) for loss in LOSSES}
    lines, short = table(curves)
    print("\n".join(lines))
    draw(curves, PAGE.with_name(PICTURE))
    write_page(lines, PAGE)
    if short:
        print(f"below {100 * LEAST_SHARE:.0f} % of the default's gain: {', '.join(short)}")
    return int(bool(short))


if __name__ == "__main__":
    sys.exit(main())
