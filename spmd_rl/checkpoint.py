"""Resumable checkpoints: everything that a run needs to go on as if it had not stopped.

    checkpoints/step-N/
        policy/         DeepSpeed's: weights, fp32 masters, moments, schedule, a shard a rank
        reference/      weights of a reference that moves, a shard a rank
        rank-R.pt       generators of rank R
        metrics.jsonl   the metrics up to this step
        state.json      steps done, version of the weights, ranks, config
        manifest.json   size and sha256 of each file

Prompts and request seeds follow from the step alone. The folder has another name until all of it is on disk.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass
from typing import Any

import torch

from spmd_rl import run_folder
from spmd_rl.config import Config, ConfigError, as_dict
from spmd_rl.files import WRITING, files_below, replace_folder, sync_tree
from spmd_rl.mesh import Mesh, generator_states, restore_generators, say_once
from spmd_rl.policy import Policy, Reference

POLICY, REFERENCE = "policy", "reference"


@dataclass
class Progress:
    """Where a run stands between two steps."""

    step: int = 0
    """Steps done."""
    weights_version: int = 0
    """Version of the weights in the engine."""
    accuracy_before: float | None = None
    """Held-out accuracy before the first step."""
    train_seconds: float = 0.0
    """Spent in steps, over all parts of the run."""


def choose(config: Config, mesh: Mesh) -> str | None:
    """The checkpoint to go on from, checked byte by byte; None to start anew. Collective, the same on every rank.

    Raises ConfigError where there are checkpoints and none is whole: starting anew is for the user to say.
    """
    resume = config.checkpoint.resume
    if resume == "never":
        return None
    here = run_folder.checkpoints(config.run.output_dir) if resume == "auto" else [resume]
    candidates = mesh.all_gather(here)[0]  # another host may see an older state of a shared folder
    faults = []
    for path in candidates:
        found = mesh.all_gather(run_folder.fault(path, mesh.share))
        fault = next((f for f in found if f), None)
        if fault is None:
            say_once(f"goes on from {path}")
            return path
        faults.append(f"{path}: {fault}")
        say_once(f"checkpoint skipped, it is not whole: {faults[-1]}")
    if faults:
        raise ConfigError("no checkpoint is whole (" + "; ".join(faults) + "): --checkpoint.resume never starts anew "
                          "and moves them aside")
    return None


def save(progress: Progress, policy: Policy, reference: Reference | None, config: Config, mesh: Mesh) -> None:
    """Write checkpoints/step-N, then remove those beyond checkpoint.keep. Collective.

    reference: written where loss.ref_model_sync_steps moves it; otherwise it is the model of the start. An error on
    any rank leaves the earlier checkpoints as they are; the caller ends the run on all ranks.
    """
    folder = run_folder.checkpoint_path(config.run.output_dir, progress.step)
    writing = folder + WRITING
    for path in mesh.on_main(lambda: [writing]):
        shutil.rmtree(path, ignore_errors=True)  # left by a run that was killed while it wrote
        os.makedirs(path)
        _write_state(path, progress, config, mesh)
    mesh.barrier()  # the folder is there before the others write into it
    policy.save(os.path.join(writing, POLICY))
    if reference and config.loss.ref_model_sync_steps:
        reference.save(os.path.join(writing, REFERENCE))
    torch.save(generator_states(), os.path.join(writing, _generators(mesh)))
    mesh.barrier()  # all files are there before they are listed
    if mesh.is_first_on_host():
        sync_tree(writing)  # what a host wrote, only that host can bring to disk
    mesh.barrier()  # on disk, before they get a name that says so
    names = sorted(set(mesh.gather_lists(files_below(writing))))  # a file that one host does not see yet is an error
    entries = mesh.all_gather(run_folder.manifest_entries(writing, mesh.share(names)))
    for path in mesh.on_main(lambda: [folder]):
        run_folder.write_manifest(writing, {name: entry for part in entries for name, entry in part.items()})
        replace_folder(path)
        run_folder.remove_old(config.run.output_dir, config.checkpoint.keep)
    mesh.barrier()  # a rank that goes on may be killed: the checkpoint has its name by then


def _write_state(folder: str, progress: Progress, config: Config, mesh: Mesh) -> None:
    state = asdict(progress) | {"world_size": mesh.world_size, "config": as_dict(config)}
    with open(os.path.join(folder, run_folder.STATE), "w", encoding="utf-8") as file:
        json.dump(state, file, indent=1)
    shutil.copyfile(os.path.join(config.run.output_dir, run_folder.METRICS),
                    os.path.join(folder, run_folder.METRICS))


def load(path: str, policy: Policy, reference: Reference | None) -> Progress:
    """Bring policy and reference to the checkpoint's state; returns where that run stood. Collective."""
    policy.load(os.path.join(path, POLICY))
    if reference and os.path.exists(os.path.join(path, REFERENCE)):
        reference.load(os.path.join(path, REFERENCE))
    state: dict[str, Any] = run_folder.read_state(path)
    return Progress(**{name: state[name] for name in asdict(Progress())})


def load_generators(path: str, mesh: Mesh) -> None:
    """Put this rank's generators where they were; last of all, since building engines draws from them."""
    restore_generators(torch.load(os.path.join(path, _generators(mesh)), weights_only=True))


def _generators(mesh: Mesh) -> str:
    return mesh.mine([f"rank-{number}.pt" for number in range(mesh.world_size)])
