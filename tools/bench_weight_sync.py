"""How long a weight sync takes, by each transport, beside the floor of plain copies and beside vLLM's own ways.

    python tools/bench_weight_sync.py --model data/qwen3-1.7b --stage 2 [--out FILE.json]
    torchrun --nproc_per_node 2 tools/bench_weight_sync.py --model data/qwen3-1.7b --stage 3 --one_gpu

Medians over --repeats syncs with the smallest and largest, in ms, on rank 0; no optimizer step comes between, so 8B
fits without moments. A sync is all from the optimizer step's end to weights in the engine and the reset of its prefix
cache; the part of ipc that only lets peers' memory go is listed by itself. `layer by layer` is vLLM's reload,
`by parameter` one load_weights of its model for each tensor, and `floor` as many bytes copied in one piece.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from spmd_rl.config import (Config, DataConfig, LossConfig, MeshConfig, ModelConfig, PolicyConfig, RolloutConfig,
                            RunConfig, WeightSyncConfig)
from spmd_rl.load_plan import Weight
from spmd_rl.mesh import Mesh, say_once
from spmd_rl.model import load_hf_config
from spmd_rl.policy import Policy
from spmd_rl.prompts import load_tokenizer
from spmd_rl.rollout import EngineState, Rollout
from spmd_rl.watchdog import leave
from spmd_rl.weight_sync import WeightSync

ROWS = ("shared", "ipc", "ipc, release", "gather", "layer by layer", "by parameter", "floor")


def main() -> None:
    """Print the table; JSON with --out."""
    args = parse_args()
    if args.one_gpu:  # several ranks on the first GPU: NCCL takes them for hosts
        os.environ |= {"NCCL_HOSTID": f"simulated-{os.environ['RANK']}", "LOCAL_RANK": "0"}
    mesh = Mesh(MeshConfig(device=args.device, timeout_s=600), args.tensor_parallel_size, 0)
    try:
        found = measure(args, mesh)
    except BaseException as error:
        mesh.fail(error)
    say_once(f"{args.model}, ZeRO {args.stage}, {mesh.world_size} ranks, {found['gib']:.2f} GiB of weights")
    for row, times in found["ms"].items():
        say_once(f"{row:<16}{times['median']:>10.2f} ms   {times['min']:.2f} to {times['max']:.2f}")
    for path in mesh.on_main(lambda: [Path(args.out)] if args.out else []):
        path.write_text(json.dumps(found, indent=1))
    mesh.leave_together()
    leave(0)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--dtype", default="bfloat16", help="weights: bfloat16 or float32")
    parser.add_argument("--stage", type=int, default=2, help="ZeRO stage")
    parser.add_argument("--tensor_parallel_size", type=int, default=1)
    parser.add_argument("--transports", default="ipc,gather", help="of shared (by itself), ipc, gather")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--plain", action="store_true", help="CPU: keep vLLM from repacking weights")
    parser.add_argument("--moving", action="store_true", help="send handles anew at every sync, as where weights move")
    parser.add_argument("--one_gpu", action="store_true", help="all ranks on the first GPU")
    parser.add_argument("--out", help="JSON file")
    return parser.parse_args()


def measure(args: argparse.Namespace, mesh: Mesh) -> dict:
    """All rows."""
    if args.plain:
        import vllm._custom_ops

        vllm._custom_ops._supports_onednn = False
    transports = args.transports.split(",")
    shares = transports == ["shared"]
    if "shared" in transports and not shares:
        raise SystemExit("--transports shared goes by itself: its engine has no weights of its own")
    config = Config(
        run=RunConfig(max_steps=2), model=ModelConfig(path=args.model, dtype=args.dtype),
        data=DataConfig(max_prompt_length=32), loss=LossConfig(importance_sampling_correction=False),
        rollout=RolloutConfig(tensor_parallel_size=args.tensor_parallel_size, max_completion_length=32,
                              enforce_eager=True, kv_cache_gib=1.0),
        policy=PolicyConfig(zero_stage=args.stage), weight_sync=WeightSyncConfig(
            transport="shared" if shares else "auto"),
        vllm={"disable_custom_all_reduce": True} if args.one_gpu and args.tensor_parallel_size > 1 else {})
    tokenizer = load_tokenizer(config.model)
    if not shares:
        rollout = Rollout(config, mesh, tokenizer, sleeps=False)
    policy = Policy(config, mesh, load_hf_config(config.model), shares)
    if shares:
        rollout = Rollout(config, mesh, tokenizer, sleeps=False, shared=policy.held_weights())
    times: dict[str, list[float]] = {row: [] for row in ROWS}
    num_bytes = 0
    for transport in transports:
        rollout.use_plan(None)
        sync = WeightSync(WeightSyncConfig(transport=transport), mesh, policy, rollout, weights_stay=not args.moving)
        num_bytes = sync.sync()  # the first one goes layer by layer, and notes the copies
        release = sync._transport.release

        def timed_release(release: Callable[[], None] = release, row: str = f"{transport}, release") -> None:
            if row in times:
                times[row].append(clock(mesh, release))
            else:
                release()

        sync._transport.release = timed_release  # type: ignore[method-assign]
        for _ in range(args.repeats):
            rollout.state = EngineState.WEIGHTS_AWAKE
            times[transport].append(clock(mesh, lambda: (sync.sync(), rollout.wake_kv_cache())))
    if not shares:
        vllms_own(args, mesh, policy, rollout, times)
    one, other = (torch.empty(num_bytes, dtype=torch.uint8, device=mesh.device) for _ in range(2))
    times["floor"] = [clock(mesh, lambda: other.copy_(one)) for _ in range(args.repeats)]
    return {"model": args.model, "stage": args.stage, "ranks": mesh.world_size, "gib": num_bytes / 2**30,
            "tensor_parallel_size": args.tensor_parallel_size, "repeats": args.repeats,
            "ms": {row: {"median": statistics.median(found), "min": min(found), "max": max(found)}
                   for row, found in times.items() if found}}


def vllms_own(args: argparse.Namespace, mesh: Mesh, policy: Policy, rollout: Rollout,
              times: dict[str, list[float]]) -> None:
    """Layer-wise reload, and a load_weights a parameter where its model can take that."""
    rollout.use_plan(None)

    def layer_by_layer() -> None:
        rollout.load_weights(policy_weights(policy), 0, policy.tied_head_name)

    times["layer by layer"] = [clock(mesh, layer_by_layer) for _ in range(args.repeats)]
    if mesh.device.type == "cpu" and not args.plain:
        return  # there vLLM has repacked what load_weights would write to

    def by_parameter(model) -> None:
        for name, tensor in policy.full_weights(2**29):
            model.load_weights([(name, tensor)])

    times["by parameter"] = [clock(mesh, lambda: rollout._llm.apply_model(by_parameter)) for _ in range(args.repeats)]


def policy_weights(policy: Policy):
    """Whole, as WeightSync's gather gives them."""
    return (Weight.of(name, tensor) for name, tensor in policy.full_weights(2**29))


def clock(mesh: Mesh, call: Callable[[], object]) -> float:
    """Milliseconds of a call, from all ranks' being ready to the device's being done."""
    synchronize(mesh)
    mesh.barrier()  # no rank waits for one that is late
    start = time.perf_counter()
    call()
    synchronize(mesh)
    return 1000 * (time.perf_counter() - start)


def synchronize(mesh: Mesh) -> None:
    """Wait for the device."""
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)


if __name__ == "__main__":
    main()
