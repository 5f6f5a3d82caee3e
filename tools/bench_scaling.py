"""The same work a rank on 1, 2, 4, ... of them: what a step costs, phase by phase, and how much of it more ranks add.

    python tools/bench_scaling.py --model data/qwen3-1.7b --train data/qwen3-1.7b-train.jsonl --ranks 1,2,4 --stage 2
    python tools/bench_scaling.py --model DIR --train FILE --ranks 1,2 --stage 3 --device cpu --steps 4

Each count is a run of the program under torchrun. Medians are over the steps after --warm_up; efficiency is tokens/s
a rank over those of the first count. With several GPUs the floor of a ZeRO-3 sync is what a rank reads of its
peers over a copy's bandwidth between two GPUs, measured first.
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
COLUMNS = (*PHASES, "tokens/s a rank", "efficiency", "sync floor", "load", "GiB rollout", "GiB train")
PROBE_BYTES = 2**30


def main() -> None:
    """Run them all; print the table; JSON with --out."""
    args = parse_args()
    bandwidth = None
    if args.device != "cpu":
        # In a process of its own: what it leaves on two of the GPUs would be missing in the runs.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            bandwidth = pool.submit(peer_bandwidth).result()
    results = []
    print(f"{'ranks':>5}" + "".join(f"{name:>16}" for name in COLUMNS))
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            rows = run(args, ranks, Path(folder))
        result = summary(rows[args.warm_up:], ranks, bandwidth if args.stage == 3 else None)
        first = results[0] if results else result
        result["efficiency"] = result["tokens/s a rank"] / first["tokens/s a rank"]
        results.append(result)
        print(f"{ranks:>5}" + "".join(f"{shown(result.get(name)):>16}" for name in COLUMNS), flush=True)
        if args.out:  # after each: a later count may not end
            found = {"options": vars(args), "peer_gb_per_s": bandwidth, "runs": results}
            Path(args.out).write_text(json.dumps(found, indent=1))


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
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm_up", type=int, default=2, help="steps that are left out")
    parser.add_argument("--out", help="JSON file")
    args = parser.parse_args()
    if args.steps <= args.warm_up:
        parser.error(f"--steps {args.steps} leaves none after --warm_up {args.warm_up}")
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


def summary(rows: list[dict], ranks: int, peer_gb_per_s: float | None) -> dict:
    """Medians over steps."""
    def median(name: str) -> float | None:
        found = [row[name] for row in rows if name in row]
        return statistics.median(found) if found else None

    result: dict = {"ranks": ranks, "steps": len(rows)} | {phase: median(f"timing/{phase}") for phase in PHASES}
    result["tokens/s a rank"] = statistics.median(row["num_tokens"] / row["timing/step"] / ranks for row in rows)
    result["load"] = median("perf/load_max_over_mean")
    for phase in ("rollout", "train"):
        result[f"GiB {phase}"] = median(f"memory/{phase}_gib")
    if peer_gb_per_s and ranks > 1:
        from_peers = rows[0]["perf/sync_gib"] * 2**30 * (ranks - 1) / ranks
        result["sync floor"] = from_peers / 1e9 / peer_gb_per_s
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
