"""The same work a rank on 1, 2, 4, ... of them: what a step costs, phase by phase, and how much of it more ranks add.

    python tools/bench_scaling.py --model data/qwen3-1.7b --train data/qwen3-1.7b-train.jsonl --ranks 1,2,4 --stage 2
    python tools/bench_scaling.py --model DIR --train FILE --ranks 1,2 --stage 3 --device cpu --steps 4

Each count is a run of the program under torchrun, --repeats times in turns: else the machine's first minutes, with cold
caches, count against one of them. Medians are over the steps after --warm_up; efficiency is tokens/s a rank over those
of the first count; lag is how much longer the slowest rank samples than the fastest. With several GPUs the floor of a
ZeRO-3 sync is what a rank reads of its peers over a copy's bandwidth between two GPUs, measured first. JSON has each
step's seconds too.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import yaml

ROOT = Path(__file__).resolve().parents[1]
PHASES = ("step", "rollout", "learn", "sync", "swap")
COLUMNS = (*PHASES, "lag", "tokens/s a rank", "efficiency", "sync floor", "load", "GiB rollout", "GiB train")
OF_A_STEP = (*(f"timing/{phase}" for phase in PHASES), "timing/rollout_lag", "perf/cpu_utilization")
PROBE_BYTES = 2**30


def main() -> None:
    """Run them all; print the table; JSON with --out."""
    args = parse_args()
    bandwidth = None
    if args.device != "cpu":
        # In a process of its own: what it leaves on two of the GPUs would be missing in the runs.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            bandwidth = pool.submit(peer_bandwidth).result()
    rows: dict[int, list[dict]] = {ranks: [] for ranks in args.ranks}
    for _ in range(args.repeats):
        for ranks in args.ranks:
            with tempfile.TemporaryDirectory() as folder:
                made = run(args, ranks, Path(folder))[args.warm_up:]
            seconds = ", ".join(f"{row['timing/step']:.4g}" for row in made)
            print(f"{ranks} ranks: a step takes {seconds} s", flush=True)
            rows[ranks] += made
            if args.out:  # after each: a later one may not end
                found = {"options": vars(args), "peer_gb_per_s": bandwidth, "runs": summaries(rows, args, bandwidth)}
                Path(args.out).write_text(json.dumps(found, indent=1))
    table: list[tuple[str, ...]] = [("ranks", *COLUMNS)]
    for result in summaries(rows, args, bandwidth):
        table.append((str(result["ranks"]), *(shown(result.get(name)) for name in COLUMNS)))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print("\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in table))


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--train", required=True, help="prompts")
    parser.add_argument("--ranks", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 4, 8])
    parser.add_argument("--stage", type=int, default=2, help="ZeRO stage")
    parser.add_argument("--device", default="cuda", help="cpu or cuda")
    parser.add_argument("--dtype", default="bfloat16", help="weights: bfloat16 or float32")
    parser.add_argument("--prompts", type=int, default=8, help="a step and rank")
    parser.add_argument("--num_generations", type=int, default=8)
    parser.add_argument("--max_prompt_length", type=int, default=256)
    parser.add_argument("--max_completion_length", type=int, default=1024)
    parser.add_argument("--gpu_memory_utilization", type=float, default=0.4)
    parser.add_argument("--transport", default="auto", help="weight_sync.transport")
    parser.add_argument("--steps", type=int, default=10, help="a run")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each count")
    parser.add_argument("--warm_up", type=int, default=2, help="steps that are left out")
    parser.add_argument("--out", help="JSON file")
    args = parser.parse_args()
    if args.steps <= args.warm_up:
        parser.error(f"--steps {args.steps} leaves none after --warm_up {args.warm_up}")
    if args.repeats < 1 or len(set(args.ranks)) < len(args.ranks):
        parser.error("--repeats is 1 or more, and --ranks names each count once")
    return args


def run(args: argparse.Namespace, ranks: int, folder: Path) -> list[dict]:
    """The metrics of a run's steps. Exits with its output where it fails."""
    config = {
        "run": {"output_dir": str(folder / "run"), "max_steps": args.steps}, "mesh": {"device": args.device},
        "model": {"path": args.model, "dtype": args.dtype},
        "data": {"train": args.train, "max_prompt_length": args.max_prompt_length},
        # Completions of one length: the work a rank is then the same for any number of ranks.
        "rollout": {"num_generations": args.num_generations, "max_completion_length": args.max_completion_length,
                    "ignore_eos": True, "gpu_memory_utilization": args.gpu_memory_utilization},
        "rewards": {"functions": ["regex"], "regex_pattern": "[0-4]"},
        "batch": {"prompts_per_step": args.prompts * ranks},
        "policy": {"zero_stage": args.stage}, "weight_sync": {"transport": args.transport}}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    if args.device == "cuda":
        shown = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        env["CUDA_VISIBLE_DEVICES"] = ",".join(shown.split(",")[:ranks])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), "-m",
         "spmd_rl.train", "--config", str(path)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False)
    if done.returncode:
        sys.exit(f"{done.stdout[-6000:]}\nthe run with {ranks} ranks failed with {done.returncode}")
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "timing/step" in row]


def summaries(rows: dict[int, list[dict]], args: argparse.Namespace, bandwidth: float | None) -> list[dict]:
    """One of each count that has run."""
    results = [summary(own, ranks, bandwidth if args.stage == 3 else None) for ranks, own in rows.items() if own]
    for result in results:
        result["efficiency"] = result["tokens/s a rank"] / results[0]["tokens/s a rank"]
    return results


def summary(rows: list[dict], ranks: int, peer_gb_per_s: float | None) -> dict:
    """Medians over steps, and the steps."""
    def median(name: str) -> float | None:
        found = [row[name] for row in rows if name in row]
        return statistics.median(found) if found else None

    result: dict = {"ranks": ranks, "steps": len(rows)} | {phase: median(f"timing/{phase}") for phase in PHASES}
    result["tokens/s a rank"] = statistics.median(row["num_tokens"] / row["timing/step"] / ranks for row in rows)
    result["lag"], result["load"] = median("timing/rollout_lag"), median("perf/load_max_over_mean")
    for phase in ("rollout", "train"):
        result[f"GiB {phase}"] = median(f"memory/{phase}_gib")
    if peer_gb_per_s and ranks > 1:
        from_peers = rows[0]["perf/sync_gib"] * 2**30 * (ranks - 1) / ranks
        result["sync floor"] = from_peers / 1e9 / peer_gb_per_s
    result["of a step"] = {name: [row.get(name) for row in rows] for name in OF_A_STEP}
    return result


def peer_bandwidth() -> float | None:
    """GB/s of a copy from one GPU to another; None with fewer than two."""
    if torch.cuda.device_count() < 2:
        return None
    source, target = (torch.empty(PROBE_BYTES, dtype=torch.uint8, device=f"cuda:{index}") for index in range(2))
    seconds = []
    for _ in range(10):
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(1)
        seconds.append(time.perf_counter() - start)
    return PROBE_BYTES / 1e9 / statistics.median(seconds[2:])


def shown(value: float | None) -> str:
    """Four digits, or a dash."""
    return "-" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    main()
