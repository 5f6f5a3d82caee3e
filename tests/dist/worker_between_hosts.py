"""Ranks with shards of ZeRO-3's shape, on simulated hosts, and what BetweenHosts gives each of them: job.json, then
results.json beside it. No engine and no DeepSpeed."""

import json
import random
import sys
import time
from pathlib import Path

import torch

from spmd_rl.between_hosts import BetweenHosts
from spmd_rl.config import MeshConfig
from spmd_rl.load_plan import Span, Weight
from spmd_rl.mesh import Mesh
from spmd_rl.watchdog import leave

SHAPES = {"embedding": (61, 16), "norm": (16,), "one": (1,), "matrix": (48, 16), "none here": (2,), "last": (7, 3)}
CPU = torch.device("cpu")


def whole(version, dtype):
    draw = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in SHAPES.items()}


def fill(held, truth):
    for weight in held:
        for span in weight.spans:
            span.flat.copy_(truth[weight.name].view(-1)[span.start:span.start + span.flat.numel()])


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    mesh = Mesh(MeshConfig(device="cpu", timeout_s=60), 1, 0)
    try:
        results = run(job, mesh)
    except BaseException as error:
        mesh.fail(error)
    everywhere = mesh.all_gather(results)
    for path in mesh.on_main(lambda: [Path(sys.argv[1]).with_name("results.json")]):
        path.write_text(json.dumps(everywhere))
    mesh.leave_together()
    leave(0)


def run(job, mesh):
    rank, world_size, dtype = mesh.mine(range(mesh.world_size)), mesh.world_size, getattr(torch, job["dtype"])
    mesh.host = f"host {job['hosts'][rank]}"
    shards = {name: -(-torch.Size(shape).numel() // world_size) for name, shape in SHAPES.items()}
    flat = torch.zeros(sum(shards.values()), dtype=dtype)
    held, place = [], 0
    for name, shape in SHAPES.items():
        start = rank * shards[name]
        count = max(0, min(shards[name], torch.Size(shape).numel() - start))
        held.append(Weight(name, shape, dtype, [Span(start, flat[place:place + count])] if count else []))
        place += shards[name]
    sync = BetweenHosts(mesh, lambda: held, True, job["bucket_bytes"])
    delay = random.Random(rank)
    wrong = []
    for version in range(job["syncs"]):
        truth = whole(version, dtype)
        fill(held, truth)
        if version % 3 == 1:  # one that its caller gives up
            flat.zero_()
            for weight in sync.weights(mesh.all_gather(sync.offer())):
                pass
            mesh.barrier()  # nobody writes new shards while another still reads the old ones
            fill(held, truth)
        offers = mesh.all_gather(sync.offer())
        for _ in range(2):  # as in a first sync, which takes them twice
            seen = []
            for weight in sync.weights(offers):
                if delay.random() < job["late"]:
                    time.sleep(0.02)  # before it reads what another rank may fill again
                seen.append(weight.name)
                if not torch.equal(weight.whole(CPU), truth[weight.name]):
                    wrong.append([version, weight.name])
            assert seen == list(SHAPES)
        sync.release()
    return {"wrong": wrong, "buckets": len(sync._buckets)}


if __name__ == "__main__":
    main()
