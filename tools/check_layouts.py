"""Run the layout table and print it: the same steps on other ranks, ZeRO stages and token budgets, for every loss.

    python tools/check_layouts.py
    python tools/check_layouts.py --losses dapo,gspo --ranks 2 --stages 2,3

A row has the largest gap of loss, metrics, gradient norm and updated weights over two rollouts to the standard (one
rank, stage 0, one packed row); the padded rows are plain Transformers in float64 and fp32. In the first rollout all
ranks but one are masked out. CPU only, with the test extra. Exits with 1 where a gap is beyond its tolerance.
"""
import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "dist")]  # the table is the tests' own

import launching  # noqa: E402
import layouts  # noqa: E402
import torch  # noqa: E402
from transformers.utils.logging import disable_progress_bar  # noqa: E402

HEADER = f"{'loss':18} {'ranks':>5} {'stage':>5} {'rows':16} {'loss':>8} {'metrics':>8} {'norm':>8} {'weights':>8}"


def line(loss, place, gaps):
    """A row of the table."""
    metrics = max(gap for name, gap in gaps.items() if name not in ("loss", "grad_norm", "weights"))
    shown = " ".join(f"{gap:8.1e}" for gap in (gaps["loss"], metrics, gaps["grad_norm"], gaps["weights"]))
    ranks, stage, rows = place
    beyond = layouts.too_large(gaps, loss)
    note = "  beyond: " + ", ".join(f"{name} {gap:.1e}" for name, gap in beyond.items()) if beyond else ""
    return f"{loss:18} {ranks:>5} {stage:>5} {rows:16} {shown}{note}"


def check(args, folder):
    """Print the table; returns (rows, rows beyond their tolerance)."""
    model = launching.make_model(folder / "model", tied=True, sft_steps=0)
    # The standard is always run, whatever was asked for.
    places = {layouts.STANDARD, *((n, s, r) for n in args.ranks for s in args.stages for r in args.rows)}
    places = sorted(places, key=lambda place: (place[0], place[1], list(layouts.ROWS).index(place[2])))
    tables = {"table": lambda num_ranks: [layouts.cell_of(stage, rows, loss) for n, stage, rows in places
                                          if n == num_ranks for loss in args.losses]}
    learned = layouts.Learned({"tied": model}, folder, tables)
    num_rows = num_beyond = 0
    print(HEADER, flush=True)
    for loss in args.losses:
        standard = learned.cell("table", *layouts.STANDARD, loss)
        found = {("-", "-", f"padded {name}"): layouts.gaps_of(standard, layouts.padded_reference(model, loss, dtype))
                 for name, dtype in (("float64", torch.float64), ("fp32", torch.float32))}
        found |= {place: layouts.gaps_of(learned.cell("table", *place, loss), standard)
                  for place in places if place != layouts.STANDARD}
        for place, gaps in found.items():
            print(line(loss, place, gaps), flush=True)
            num_beyond += bool(layouts.too_large(gaps, loss))
        num_rows += len(found)
    return num_rows, num_beyond


def names(known, kind=str):
    """A parser of a comma-separated part of `known`."""
    def parse(text):
        found = [kind(name) for name in text.split(",")]
        if not set(found) <= set(known):
            raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(map(str, known))}")
        return found
    return parse


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for option, known, kind in (("losses", list(layouts.LOSSES), str), ("ranks", layouts.RANKS, int),
                                ("stages", layouts.STAGES, int), ("rows", list(layouts.ROWS), str)):
        parser.add_argument(f"--{option}", type=names(known, kind), default=known, metavar="A,B",
                            help=f"of {', '.join(map(str, known))}; all by default")
    args = parser.parse_args(arguments)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        num_rows, num_beyond = check(args, Path(folder))
    print(f"{num_rows} rows of {len(args.losses)} losses: {num_beyond or 'none'} beyond its tolerance, "
          f"{layouts.TOLERANCE:g} ({layouts.TOLERANCE_OF_RATIOS:g} where ratios weigh, "
          f"{layouts.TOLERANCE_OF_COMPLETIONS:g} where completions' do)")
    return int(num_beyond > 0)


if __name__ == "__main__":
    sys.exit(main())
