"""Does the engine have the policy's weights, bit for bit? Fills it with noise, syncs, and compares.

    torchrun --nproc_per_node 2 tools/check_weight_sync.py --model DIR --stages 0,1,2,3 --transports ipc,gather
    torchrun --nproc_per_node 2 tools/check_weight_sync.py --model DIR --stages 3 --bucket_mib 1 --steps 200

With `shared` nothing is filled: every parameter of the engine has to lie in the policy's storages, and have its own
weight's bits. For each other transport and each ZeRO stage: a first sync (through vLLM's own loading), optimizer steps,
and a sync after each. The truth is the policy's gathered weights, loaded by vLLM one by one. Where vLLM keeps repacked
weights, as it does on a CPU without --plain, log-probs of engine and policy stand for the bits. Exits with 1 where a
cell is wrong.
"""

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path

import psutil
import torch

from spmd_rl.batch import Completion, pack
from spmd_rl.config import (BatchConfig, Config, DataConfig, LossConfig, MeshConfig, ModelConfig, PolicyConfig,
                            RolloutConfig, RunConfig, WeightSyncConfig)
from spmd_rl.load_plan import Weight
from spmd_rl.memory import away
from spmd_rl.mesh import Mesh, say_once
from spmd_rl.model import load_hf_config
from spmd_rl.offload import HostMemory, Tenant
from spmd_rl.policy import Policy
from spmd_rl.prompts import load_tokenizer
from spmd_rl.rollout import EngineState, Rollout, parts_of
from spmd_rl.watchdog import leave
from spmd_rl.weight_sync import WeightSync

# Largest difference of log-probs that rounding explains: in bf16 up to 0.054 between equal bits of small random models.
GAP = {"float32": 1e-5, "bfloat16": 0.1}


def main() -> None:
    """Check all cells; the table is the first rank's."""
    args = parse_args()
    if args.one_gpu:  # several ranks on the first GPU: NCCL takes them for hosts
        os.environ |= {"NCCL_HOSTID": f"simulated-{os.environ['RANK']}", "LOCAL_RANK": "0"}
    mesh = Mesh(MeshConfig(device=args.device, timeout_s=300), args.tensor_parallel_size, 0)
    if args.hosts > 1:
        mesh.host += f"/{mesh.mine(range(mesh.world_size)) * args.hosts // mesh.world_size}"
    try:
        results = check(args, mesh)
    except BaseException as error:
        mesh.fail(error)
    wrong = [cell for cell in results if not cell["right"]]
    say_once(f"{len(results) - len(wrong)} of {len(results)} cells right")
    if args.out:
        for path in mesh.on_main(lambda: [Path(args.out)]):
            path.write_text(json.dumps(results, indent=1))
    mesh.leave_together()
    leave(1 if wrong else 0)


def parse_args() -> argparse.Namespace:
    """The command line."""
    def several(kind):
        return lambda text: [kind(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--dtype", default="bfloat16", help="weights: bfloat16 or float32")
    parser.add_argument("--stages", type=several(int), default=[2, 3], help="ZeRO stages")
    parser.add_argument("--transports", type=several(str), default=["ipc", "gather"])
    parser.add_argument("--tensor_parallel_size", type=int, default=1)
    parser.add_argument("--bucket_mib", type=several(int), default=[512], help="of gather")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps, each with a sync, after the first sync")
    parser.add_argument("--moving", action="store_true", help="weights leave the device and return before each sync")
    parser.add_argument("--plain", action="store_true", help="CPU: keep vLLM from repacking weights")
    parser.add_argument("--hosts", type=int, default=1, help="take the ranks for those of so many hosts")
    parser.add_argument("--one_gpu", action="store_true", help="all ranks on the first GPU")
    parser.add_argument("--out", help="JSON file")
    return parser.parse_args()


def check(args: argparse.Namespace, mesh: Mesh) -> list[dict]:
    """One engine, and a policy a stage."""
    if args.plain:
        import vllm._custom_ops

        vllm._custom_ops._supports_onednn = False
    config = make_config(args)
    tokenizer = load_tokenizer(config.model)
    copied = [transport for transport in args.transports if transport != "shared"]
    engines = [Rollout(config, mesh, tokenizer, sleeps=False)] if copied else []  # one that goes takes the groups along
    results = []
    say_once(f"{'stage':>5} {'transport':>9} {'bucket':>6} {'compared':>10} {'wrong':>6} {'gap':>8} {'s a sync':>9}")
    for stage in args.stages:
        config.policy.zero_stage = stage
        config.weight_sync.transport = "shared" if "shared" in args.transports and stage < 3 else "auto"
        policy = Policy(config, mesh, load_hf_config(config.model), config.weight_sync.transport == "shared")
        for transport, bucket in cells(args):
            if transport == "shared" and stage == 3:
                continue
            if transport == "shared":
                engines.append(Rollout(config, mesh, tokenizer, sleeps=False, shared=policy.held_weights()))
            cell = check_cell(args, mesh, policy, engines[-1 if transport == "shared" else 0], transport, bucket)
            results.append(cell)
            say_once(f"{stage:>5} {transport:>9} {bucket:>6} {cell['compared']:>10} {cell['wrong']:>6} "
                     f"{cell['gap']:>8.1e} {cell['seconds']:>9.4f}")
        policy.close()
    return results


def cells(args: argparse.Namespace) -> list[tuple[str, int]]:
    """A bucket is gather's alone, and that of what goes between hosts."""
    return [(transport, bucket) for transport in args.transports for bucket in args.bucket_mib
            if transport == "gather" or args.hosts > 1 or bucket == args.bucket_mib[0]]


def make_config(args: argparse.Namespace) -> Config:
    """A small engine, and steps that change every weight."""
    one_gpu = {"disable_custom_all_reduce": True} if args.one_gpu and args.tensor_parallel_size > 1 else {}
    return Config(
        run=RunConfig(max_steps=10**6), model=ModelConfig(path=args.model, dtype=args.dtype),
        data=DataConfig(max_prompt_length=32), batch=BatchConfig(max_tokens_per_microbatch=256),
        rollout=RolloutConfig(tensor_parallel_size=args.tensor_parallel_size, max_completion_length=32,
                              enforce_eager=True, kv_cache_gib=1.0),
        loss=LossConfig(importance_sampling_correction=False),
        policy=PolicyConfig(optimizer="sgd", learning_rate=0.1, gradient_checkpointing=False), vllm=one_gpu)


def check_cell(args: argparse.Namespace, mesh: Mesh, policy: Policy, rollout: Rollout, transport: str,
               bucket: int) -> dict:
    """Syncs over noise; what was wrong after any of them, on any rank."""
    rollout.use_plan(None)
    sync = WeightSync(WeightSyncConfig(transport=transport, bucket_mib=bucket), mesh, policy, rollout,
                      weights_stay=not args.moving)
    host = HostMemory(pinned=mesh.device.type == "cuda", chunk_bytes=2**26)
    wrong: set[str] = set()
    seconds, resources, gap, compared = [], [], 0.0, 0
    for number in range(args.steps + 1):
        if number:
            learn(policy, mesh)
        if args.moving and transport != "shared":
            with away(mesh.device, host, policy.storages, [Tenant.WEIGHTS]):
                pass
        if transport != "shared":
            truth = true_weights(policy, rollout)
            make_noise(policy, rollout)
        start = time.perf_counter()
        sync.sync()
        if mesh.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        found = rollout.engine_parameters()
        if transport == "shared":
            wrong |= not_views(found, policy) | not_theirs(found, policy, rollout)
        else:
            wrong |= {name for name, tensor in found.items() if not torch.equal(bits(tensor), truth[name])}
        compared = sum(tensor.numel() for tensor in found.values())
        rollout.wake_kv_cache()
        if number in (0, args.steps):
            gap = max(gap, logprob_gap(policy, rollout, mesh))
        rollout.state = EngineState.WEIGHTS_LOADED
        resources.append(used(mesh))
    everywhere = mesh.all_gather((sorted(wrong), gap, resources))
    wrong_names = sorted({name for names, _, _ in everywhere for name in names})
    gap = max(gap for _, gap, _ in everywhere)
    return {"stage": policy.zero_stage, "transport": sync.transport, "bucket_mib": bucket, "compared": compared,
            "how": sync.how, "wrong": len(wrong_names), "wrong_names": wrong_names[:8], "gap": gap,
            "seconds": sorted(seconds[1:] or seconds)[len(seconds[1:]) // 2], "first_seconds": seconds[0],
            "resources": [found for _, _, found in everywhere], "version": rollout.version,
            "right": not wrong_names and gap <= GAP[args.dtype] and sync.transport == transport}


def learn(policy: Policy, mesh: Mesh) -> None:
    """One optimizer step on random tokens."""
    draw = random.Random(policy.num_updates)
    ids = [draw.randrange(200) for _ in range(24)]
    row = pack([Completion(0, 0, ids[:4], ids[4:], [0.0] * 20, "length", 0)], mesh.device, policy.row_block)
    policy.forward_backward([row], lambda mb, logprobs_N, entropy_N: -logprobs_N.mean())
    assert policy.step().is_applied, "the step on random tokens was not finite"


def true_weights(policy: Policy, rollout: Rollout) -> dict[str, torch.Tensor]:
    """Bits of the engine's parameters as vLLM loads the gathered weights by itself."""
    plan = rollout.use_plan(None)
    rollout.load_weights((Weight.of(name, tensor.clone()) for name, tensor in policy.full_weights(2**29)), 0,
                         policy.tied_head_name)
    rollout.use_plan(plan)
    return {name: bits(tensor).clone() for name, tensor in rollout.engine_parameters().items()}


def make_noise(policy: Policy, rollout: Rollout) -> None:
    """Overwrite everything that vLLM loads, its repacked copies too."""
    plan = rollout.use_plan(None)
    rollout.load_weights((Weight.of(name, torch.randn_like(tensor)) for name, tensor in policy.full_weights(2**29)), 0,
                         policy.tied_head_name)
    rollout.use_plan(plan)


def not_views(engine: dict[str, torch.Tensor], policy: Policy) -> set[str]:
    """Parameters of the engine that do not lie in the policy's storages."""
    storages = {span.flat.untyped_storage().data_ptr(): span.flat.untyped_storage().nbytes()
                for weight in policy.held_weights() for span in weight.spans}
    return {name for name, tensor in engine.items()
            if not any(start <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= start + size
                       for start, size in storages.items())}


def not_theirs(engine: dict[str, torch.Tensor], policy: Policy, rollout: Rollout) -> set[str]:
    """Parameters of the engine that have not the bits of their own weights, one after another where vLLM fuses them."""
    fused = rollout._llm.apply_model(lambda model: model.packed_modules_mapping)[0]
    weights = {weight.name: weight.spans[0].flat for weight in policy.held_weights()}
    own = {name: torch.cat([weights[part] for part in parts_of(name, fused)]) for name in engine}
    return {name for name, tensor in engine.items() if not torch.equal(bits(tensor).view(-1), bits(own[name]))}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """NaN is equal to itself in them."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def logprob_gap(policy: Policy, rollout: Rollout, mesh: Mesh) -> float:
    """Largest difference between engine and policy over some tokens."""
    import vllm

    draw = random.Random(7)
    ids = [draw.randrange(200) for _ in range(24)]
    parameters = vllm.SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, seed=0, detokenize=False)
    output = rollout._llm.generate([{"prompt_token_ids": ids}], parameters, use_tqdm=False)[0]
    by_engine = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[4:], ids[4:], strict=True)]
    row = pack([Completion(0, 0, ids[:4], ids[4:], by_engine, "length", 0)], mesh.device, policy.row_block)
    (by_policy_N, _), = policy.score([row])
    return float((by_policy_N[:len(by_engine)].cpu() - torch.tensor(by_engine)).abs().max())


def used(mesh: Mesh) -> dict[str, float]:
    """What must not grow from sync to sync."""
    process = psutil.Process()
    found = {"rss_mib": process.memory_info().rss / 2**20, "files": process.num_fds(), "maps": len(maps())}
    if mesh.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(mesh.device)
        found["device_mib"] = (total - free) / 2**20
    return found


def maps() -> list[str]:
    """Mappings of this process."""
    return Path("/proc/self/maps").read_text().splitlines()


if __name__ == "__main__":
    sys.exit(main())
