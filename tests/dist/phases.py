"""Saves of one job in every state of its memory."""

import json
from pathlib import Path

from spmd_rl import run_folder
from spmd_rl import step as step_module
from spmd_rl.checkpoint import Progress
from spmd_rl.offload import Tenant
from spmd_rl.train import SAVED

PHASES = ("rollout", "train", "sync", "rollout")


def saved_in_phases(parts, saver):
    """Checksums of the policy's files saved in rollout, with the states away, in train, where they have just come back,
    with the engine's weights awake alone, and in rollout beside the work that follows; whether the masters were away,
    and the engine's state at the end. The run's folder has its metrics.jsonl."""
    parts.config.checkpoint.keep = len(PHASES)
    away = []
    for number, phase in enumerate(PHASES, 1):
        if number == len(PHASES):
            parts.config.checkpoint.background = True
            step_module.sync(parts)
        parts.memory.enter(phase)
        parts.memory._settle()  # copies out go on behind it
        away.append(sum(storage.nbytes() for storage in parts.policy.storages()[Tenant.MASTERS]) == 0)
        with parts.memory.holding(SAVED):
            saver.save(Progress(number))
        step_module.sync_again(parts)
    saver.finish()
    manifests = [json.loads(Path(run_folder.checkpoint_path(parts.config.run.output_dir, number), run_folder.MANIFEST)
                            .read_text())["files"] for number in range(1, len(PHASES) + 1)]
    return {"state": parts.rollout.state.name, "away": away,
            "files": [{name: entry["sha256"] for name, entry in files.items() if name.startswith("policy/")}
                      for files in manifests]}
