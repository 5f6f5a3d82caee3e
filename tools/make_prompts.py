"""Write training and held-out prompts of one reasoning-gym task as JSONL.

A row holds `prompt`, `answer`, and `task` and `metadata`, which are what reasoning-gym's own scorer of that task needs:
`reasoning_gym.get_score_answer_fn(row["task"])(completion, {"answer": row["answer"], "metadata": row["metadata"]})`.
The side of a prompt is decided by its text alone, so no held-out prompt of any seed is a training prompt of any seed.

    python tools/make_prompts.py --train train.jsonl --heldout heldout.jsonl --seed 0 --option max_terms=2
"""
import argparse
import json
import zlib
from pathlib import Path

import reasoning_gym


def is_heldout(prompt):
    """True for one prompt text in eight, the same ones in every run and on every machine."""
    return zlib.crc32(prompt.encode()) % 8 == 0


def draw_rows(task, options, *, num_train, num_heldout, seed):
    """Return (training rows, held-out rows) with no prompt twice.

    Raises ValueError when the task with these options has too few different prompts.
    """
    wanted = {False: num_train, True: num_heldout}
    max_draws = 100 * sum(wanted.values())
    # reasoning-gym seeds item i with seed + i: neighbouring seeds would give the same items, shifted by one.
    dataset = reasoning_gym.create_dataset(task, size=max_draws, seed=seed * max_draws, **options)
    rows, seen = {False: [], True: []}, set()
    for i in range(max_draws):
        entry = dataset[i]
        prompt = entry["question"]
        side = rows[is_heldout(prompt)]
        if prompt in seen or len(side) == wanted[is_heldout(prompt)]:
            continue
        seen.add(prompt)
        side.append({"prompt": prompt, "answer": entry["answer"], "task": task, "metadata": entry["metadata"]})
        if all(len(rows[key]) == wanted[key] for key in wanted):
            return rows[False], rows[True]
    raise ValueError(
        f"--task {task} with {options} gave {len(rows[False])} training and {len(rows[True])} held-out prompts in "
        f"{max_draws} draws, wanted {num_train} and {num_heldout}: ask for fewer, or for a wider task"
    )


def write_jsonl(path, rows):
    """Write one JSON object a line, making the folder where it is absent."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def parse_option(text):
    """`name=value` -> (name, value), the value read as JSON. Raises ArgumentTypeError for anything else."""
    name, equals, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: write name=value with a JSON value, as max_terms=2") from error


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="chain_sum", help="reasoning-gym's name of the task")
    parser.add_argument("--option", type=parse_option, action="append", default=[], metavar="NAME=VALUE",
                        help="option of the task, as max_terms=2; may be given several times")
    parser.add_argument("--train", required=True, help="JSONL file to write")
    parser.add_argument("--heldout", required=True, help="JSONL file to write")
    parser.add_argument("--num_train", type=int, default=8192, help="rows")
    parser.add_argument("--num_heldout", type=int, default=1024, help="rows")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        train, heldout = draw_rows(args.task, dict(args.option), num_train=args.num_train,
                                   num_heldout=args.num_heldout, seed=args.seed)
    except ValueError as error:
        parser.error(str(error))
    write_jsonl(args.train, train)
    write_jsonl(args.heldout, heldout)
    print(f"{args.train}: {len(train)} rows, {args.heldout}: {len(heldout)} rows, such as {train[0]['prompt']!r} -> "
          f"{train[0]['answer']!r}")


if __name__ == "__main__":
    main()
