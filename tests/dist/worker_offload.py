"""One rank of test_moving.py: twins of one policy, of which one never moves.

    torchrun --nproc_per_node N worker_offload.py JOB.json

JOB.json has `model`, `device` and `cells`; RESULTS.json beside it gets {cell: [what each rank found]}.
"""

import json
import sys
from pathlib import Path

import torch
import worker_learn
from ranks import one_rank

from spmd_rl import offload
from spmd_rl.batch import pack, plan_step
from spmd_rl.config import (BatchConfig, Config, LossConfig, ModelConfig, PolicyConfig, RolloutConfig,
                            RunConfig)
from spmd_rl.metrics import Metrics
from spmd_rl.model import load_hf_config
from spmd_rl.offload import HostMemory, Offloader, Tenant
from spmd_rl.plan import POLICY
from spmd_rl.policy import Policy, Reference
from spmd_rl.step import Parts, learn, set_advantages
from spmd_rl.watchdog import leave

CHUNK_BYTES = 2**20  # smaller than the larger storages: a storage goes over several chunks


class StandIn:
    """In place of Memory: the cells move by themselves, and wait before the optimizer step."""

    def __init__(self, wait):
        self.wait_for_step = wait

    def enter(self, phase):
        pass


class Broken(Exception):
    """The failure put into a move."""


def config_of(cell, model):
    raw = {"zero_optimization": cell.get("raw", {})}
    if cell["offload_optimizer"]:
        raw["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    return Config(
        run=RunConfig(max_steps=len(worker_learn.STEPS) * 2), model=ModelConfig(path=model, dtype=cell["dtype"]),
        rollout=RolloutConfig(max_completion_length=16),
        batch=BatchConfig(max_tokens_per_microbatch=40), loss=LossConfig(importance_sampling_correction=False),
        # Decay makes two parameter groups whose members lie between one another in the model.
        policy=PolicyConfig(zero_stage=cell["stage"], optimizer=cell["optimizer"], weight_decay=0.01,
                            learning_rate=1e-2), deepspeed=raw)


def one_step(parts, number):
    completions = worker_learn.completions_of(worker_learn.STEPS[number % len(worker_learn.STEPS)])
    set_advantages(parts, completions)
    learn(parts, completions)


def bits(policy):
    """{place: bytes} of every storage, of what a checkpoint would have, and of the whole weights."""
    found = {f"{tenant.value} {i}": bytes_of(storage) for tenant, storages in policy.storages().items()
             if tenant is not Tenant.SCRATCH for i, storage in enumerate(storages)}
    found |= {piece.key: piece.tensor.detach().clone() for piece in policy.pieces()}
    return found | {name: tensor.clone() for name, tensor in policy.full_weights(2**20)}


def bytes_of(storage):
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).clone()


def left_on_device(policy, tenants):
    """Bytes that did not leave, small ones aside."""
    return sum(storage.nbytes() for tenant, storages in policy.storages().items() if tenant in tenants
               for storage in storages
               if storage.nbytes() >= offload.SMALL_BYTES and storage.device.type == policy.model.lm.device.type)


def cycle(mover, policy, leaving):
    """Out, twice to see that the second call does nothing, and back; returns what was left on the device."""
    mover.leave(leaving)
    mover.leave(leaving)
    mover.finish_leaving()
    left = left_on_device(policy, leaving)
    mover.enter(leaving)
    mover.enter(leaving)
    mover.wait(leaving)
    return left


def interrupted(mover, policy, at, monkey):
    """A cycle whose copy number `at` fails, then whole ones."""
    copy, count = offload._copy, 0

    def failing(*args, **kwargs):
        nonlocal count
        count += 1
        if count == at:
            raise Broken(f"copy {at}")
        copy(*args, **kwargs)

    offload._copy = failing
    try:
        cycle(mover, policy, POLICY)
    except Broken:
        monkey.append(at)
    finally:
        offload._copy = copy
    mover.enter(POLICY)  # either the failed call goes on, or what it did is taken back
    mover.wait(POLICY)
    return cycle(mover, policy, POLICY)


def run_twins(cell, model, mesh):
    config = config_of(cell, model)
    found = {"left": [], "broken": [], "differs": [], "tenants": {}}
    seen = []
    for is_moving in (False, True):
        policy = Policy(config, mesh, load_hf_config(config.model))
        mover = Offloader(mesh.device, HostMemory(mesh.device.type == "cuda", CHUNK_BYTES), policy.storages)
        parts = Parts(config=config, mesh=mesh, metrics=Metrics(mesh, []), tokenizer=None, sampler=None, rewards=None,
                      rollout=None, policy=policy, reference=None, weight_sync=None,
                      memory=StandIn(lambda mover=mover: mover.wait(POLICY)))
        states = [bits(policy)]
        for number in range(4):
            if is_moving:
                found["left"].append(cycle(mover, policy, POLICY))
            one_step(parts, number)
            if is_moving:
                for leaving in ([Tenant.MOMENTS], [t for t in POLICY if t is not Tenant.WEIGHTS], [Tenant.WEIGHTS]):
                    found["left"].append(cycle(mover, policy, leaving))
                # What the step needs last may still be on its way when forward begins.
                mover.leave(POLICY)
                mover.enter(POLICY[::-1])
                mover.leave([Tenant.MASTERS])
                mover.enter(POLICY)
                if number == 1:
                    for at in range(1, 9):
                        found["left"].append(interrupted(mover, policy, at, found["broken"]))
                mover.wait(POLICY)
            states.append(bits(policy))
        if is_moving:
            found["tenants"] = {t.value: n for t, n in mover.bytes_on_device().items()}
            found["host"] = mover._host.num_bytes
        policy.close()
        seen.append(states)
    for step, (never, moved) in enumerate(zip(*seen, strict=True)):
        if never.keys() != moved.keys():
            found["differs"].append(f"step {step}: storages {sorted(never.keys() ^ moved.keys())}")
        found["differs"] += [f"step {step}: {name}" for name in never
                             if name in moved and not torch.equal(never[name], moved[name])]
    first, last = seen[0][0], seen[0][-1]
    found["trained"] = any(name in last and not torch.equal(first[name], last[name]) for name in first)
    return found


def run_reference(cell, model, mesh):
    """A forward-only engine gives the same log-probs after a cycle."""
    config = config_of(cell, model)
    reference = Reference(config, mesh, load_hf_config(config.model))
    mover = Offloader(mesh.device, HostMemory(mesh.device.type == "cuda", CHUNK_BYTES), reference.storages)
    plan = plan_step(worker_learn.completions_of(worker_learn.RAGGED), mesh.world_size, 40)
    rows = [pack(row, mesh.device, reference.row_block) for row in mesh.mine(plan)]
    before = [logprobs for logprobs, _ in reference.score(rows)]
    left = []
    for _ in range(2):
        left.append(cycle(mover, reference, [Tenant.REFERENCE]))
    after = [logprobs for logprobs, _ in reference.score(rows)]
    reference.close()
    return {"left": left, "is_equal": all(map(torch.equal, before, after)), "rows": len(rows)}


def main():
    path = Path(sys.argv[1])
    job = json.loads(path.read_text())
    results = {}
    with one_rank(job["device"]) as mesh:
        for name, cell in job["cells"].items():
            mesh.phase = name
            run = run_reference if cell["reference"] else run_twins
            results[name] = mesh.all_gather(run(cell, job["model"], mesh))
        for place in mesh.on_main(lambda: [path.with_name("results.json")]):
            place.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
    leave(0)
