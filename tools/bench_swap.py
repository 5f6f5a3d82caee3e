"""Takes a policy's states off the GPU and back, as fast as the bus: bandwidth, what is left, and drift.

    python tools/bench_swap.py --model data/qwen3-1.7b --stage 2 [--cycles 50] [--out FILE.json]

No engine is started. One optimizer step comes first, so that all states are there. Printed are GB/s each way beside
a plain pinned copy and DeepSpeed's own calls, the driver's view of what is left when everything is away, host memory
and open files over the cycles, and whether every bit came back.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time

import psutil
import torch

from spmd_rl.batch import Completion, pack, plan_step
from spmd_rl.config import BatchConfig, Config, LossConfig, MeshConfig, ModelConfig, PolicyConfig, RunConfig
from spmd_rl.load_plan import Weight
from spmd_rl.memory import claim_workspaces
from spmd_rl.mesh import Mesh, used_bytes
from spmd_rl.model import load_hf_config
from spmd_rl.offload import HostMemory, Offloader, Tenant, bytes_of
from spmd_rl.plan import POLICY
from spmd_rl.policy import Policy

GIB = 2**30
FLOOR_BYTES = 2 * GIB
CONTEXT_BYTES = GIB  # more than a CUDA context
# In a run seconds pass while states are away. The driver clears what was freed then; a return at once waits for that.
AWAY_S = 0.3


def main() -> None:
    """Run and print; JSON with --out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--stage", type=int, default=2, help="ZeRO stage")
    parser.add_argument("--dtype", default="bfloat16", help="weights: bfloat16 or float32")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the step before")
    parser.add_argument("--cycles", type=int, default=50, help="out and back, so many times")
    parser.add_argument("--deepspeed", action="store_true", help="DeepSpeed's own calls too, where they work")
    parser.add_argument("--out", help="JSON file")
    args = parser.parse_args()
    mesh = Mesh(MeshConfig(), 1, 0)
    result = measure(args, mesh)
    print("\n".join(f"{name:<34}{value}" for name, value in result.items()))
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    mesh.close()


def measure(args: argparse.Namespace, mesh: Mesh) -> dict[str, object]:
    """All figures, by name."""
    is_cuda = mesh.device.type == "cuda"
    claim_workspaces(mesh.device)
    context = used_bytes(mesh.device)
    most = max(mesh.all_gather(context))
    if is_cuda and most > CONTEXT_BYTES:
        sys.exit(f"{most / GIB:.1f} GiB of a GPU are in use before this begins, by other processes: what is left "
                 "of its own could not be told")
    config = Config(run=RunConfig(max_steps=args.cycles + 2), model=ModelConfig(path=args.model, dtype=args.dtype),
                    batch=BatchConfig(max_tokens_per_microbatch=args.tokens),
                    loss=LossConfig(importance_sampling_correction=False), policy=PolicyConfig(zero_stage=args.stage))
    policy = Policy(config, mesh, load_hf_config(config.model))
    step(policy, mesh, args.tokens)
    host = HostMemory(pinned=is_cuda)
    mover = Offloader(mesh.device, host, policy.storages)
    start = time.perf_counter()
    storages = policy.storages()
    walk = time.perf_counter() - start
    sizes = {tenant.value: sum(s.nbytes() for s in found) / GIB for tenant, found in storages.items()}
    before = digest(policy, mesh.device)
    start = time.perf_counter()
    cycle(mover, mesh)
    first = time.perf_counter() - start
    rates: dict[str, list[float]] = {"out": [], "in": []}
    walls: list[float] = []
    drift = []
    for _ in range(args.cycles):
        start = time.perf_counter()
        (out, back), left, reserved = cycle(mover, mesh)
        walls.append(time.perf_counter() - start - (AWAY_S if is_cuda else 0))
        for name, moved in (("out", out), ("in", back)):
            rates[name].append(moved.copied_bytes / 1e9 / moved.seconds())
        drift.append((left, reserved, psutil.Process().memory_info().rss, len(os.listdir("/proc/self/fd"))))
    is_equal = digest(policy, mesh.device) == before
    step(policy, mesh, args.tokens)  # still trains
    left_after_step = cycle(mover, mesh)[1]
    result: dict[str, object] = {
        "stage": args.stage, "states GiB": {name: round(size, 3) for name, size in sizes.items() if size},
        "out GB/s": spread(rates["out"]), "back GB/s": spread(rates["in"]),
        "floor GB/s (one pinned copy)": floor(mesh) if is_cuda else "no GPU",
        "seconds a cycle, wall": spread(walls), "first cycle, pinning, s": round(first, 2),
        "finding the storages, ms": round(walk * 1e3, 2),
        "context GiB": round(context / GIB, 3),
        "left above the context GiB, 1st": round((drift[0][0] - context) / GIB, 3),
        "left above the context GiB, last": round((drift[-1][0] - context) / GIB, 3),
        "left after another step GiB": round((left_after_step - context) / GIB, 3),
        "reserved above alive MiB, last": round(drift[-1][1] / 2**20, 1),
        "host GiB, 3rd and last cycle": [round(drift[min(2, len(drift) - 1)][2] / GIB, 3),
                                         round(drift[-1][2] / GIB, 3)],
        "open files, 3rd and last cycle": [drift[min(2, len(drift) - 1)][3], drift[-1][3]],
        "pinned GiB": host.num_bytes / GIB, "every bit came back": is_equal,
    }
    if args.deepspeed:
        result["DeepSpeed's own calls GB/s, left GiB"] = deepspeed_calls(policy, mesh, context)
    policy.close()
    return result


def cycle(mover: Offloader, mesh: Mesh) -> tuple[tuple, int, int]:
    """Everything out and back: (moves, driver-visible bytes while away, torch's reserved less alive bytes)."""
    out = mover.leave(POLICY)
    mover.finish_leaving()
    reserved = 0
    if mesh.device.type == "cuda":
        torch.cuda.empty_cache()  # what is measured is what the driver could give to another
        reserved = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    left = used_bytes(mesh.device)
    if mesh.device.type == "cuda":
        time.sleep(AWAY_S)  # until the driver has cleared what was freed, as in a run
    back = mover.enter(POLICY)
    mover.wait(POLICY)
    return (out, back), left, reserved


def step(policy: Policy, mesh: Mesh, num_tokens: int) -> None:
    """One optimizer step on random tokens, so that masters, moments and gradients are there and activations were."""
    draw = random.Random(0)
    vocabulary = policy.hf_config.vocab_size
    length = min(num_tokens, 2048)
    made = [Completion(0, i, [draw.randrange(vocabulary)], [draw.randrange(vocabulary) for _ in range(length - 1)],
                       [0.0] * (length - 1), "length", 0, reward=1.0, advantage=1.0)
            for i in range(num_tokens // length)]
    rows = [pack(row, mesh.device, policy.row_block)
            for row in mesh.mine(plan_step(made, mesh.world_size, num_tokens))]
    policy.forward_backward(rows, lambda mb, logprobs_N, entropy_N: -logprobs_N.mean())
    policy.step()


def digest(policy: Policy, device: torch.device) -> list[tuple[str, int]]:
    """A number for each storage's bits."""
    return [(tenant.value, Weight.of(tenant.value, bytes_of(storage)).fingerprint(device))
            for tenant, storages in policy.storages().items() if tenant is not Tenant.SCRATCH for storage in storages]


def deepspeed_calls(policy: Policy, mesh: Mesh, context: int) -> object:
    """GB/s out and back by engine.offload_states, and what stays; the reason where DeepSpeed refuses."""
    num_bytes = sum(s.nbytes() for storages in policy.storages().values() for s in storages)
    seconds: dict[str, list[float]] = {"out": [], "back": []}
    left = 0
    try:
        for _ in range(3):  # the first pins
            for name, call in (("out", policy.engine.offload_states), ("back", policy.engine.reload_states)):
                torch.cuda.synchronize()  # the time is the call's
                start = time.perf_counter()
                call()
                torch.cuda.synchronize()  # the time is the call's
                seconds[name].append(time.perf_counter() - start)
                if name == "out":
                    torch.cuda.empty_cache()  # as above
                    left = used_bytes(mesh.device)
    except (AssertionError, RuntimeError, AttributeError, ValueError) as error:
        return f"refused: {type(error).__name__} {error}"
    return [round(num_bytes / 1e9 / seconds[name][-1], 1) for name in seconds] + [round((left - context) / GIB, 2)]


def floor(mesh: Mesh) -> list[float]:
    """GB/s of one large pinned copy each way, median of 5."""
    pinned = torch.empty(FLOOR_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(FLOOR_BYTES, dtype=torch.uint8, device=mesh.device)
    rates = []
    for target, source in ((pinned, device), (device, pinned)):
        seconds = []
        for _ in range(5):
            torch.cuda.synchronize()  # the time is the copy's
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()  # the time is the copy's
            seconds.append(time.perf_counter() - start)
        rates.append(round(FLOOR_BYTES / 1e9 / statistics.median(seconds), 1))
    return rates


def spread(values: list[float]) -> str:
    """Median, least and most."""
    return f"{statistics.median(values):.3g} ({min(values):.3g}-{max(values):.3g})"


if __name__ == "__main__":
    main()
