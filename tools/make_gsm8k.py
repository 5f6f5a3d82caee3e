"""Write GSM8K as JSONL of our form: `prompt` as messages, `answer` as the final number.

    python tools/make_gsm8k.py --split train --output data/gsm8k-train.jsonl
    python tools/make_gsm8k.py --split test --output data/gsm8k-test.jsonl

`--source` is the data set's name or a local copy: a folder, or a JSONL or parquet file with `question` and `answer`.
"""
import argparse
import json
from pathlib import Path

from spmd_rl.config import ConfigError
from spmd_rl.rows import open_source

INSTRUCTION = "Let's think step by step and put the final answer within \\boxed{}."


def convert(record, where):
    """Our row of one of GSM8K's, whose answer ends in `#### NUMBER`."""
    solution, mark, number = record["answer"].rpartition("####")
    if not mark:
        raise ConfigError(f"{where}: no #### in the answer {record['answer']!r:.80}")
    prompt = [{"role": "user", "content": f"{record['question'].strip()} {INSTRUCTION}"}]
    return {"prompt": prompt, "answer": number.strip().replace(",", ""), "solution": solution.strip()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", default="openai/gsm8k")
    parser.add_argument("--split", default="train")
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    try:
        source = open_source(args.source, args.split, "main", "--source")
        rows = [convert(source.parse(raw, where), where) for _, where, raw, _ in source.scan()]
    except ConfigError as error:
        parser.error(str(error))
    Path(args.output).write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{args.output}: {len(rows)} rows")


if __name__ == "__main__":
    main()
