"""What is in a run's folder: the earlier run, its checkpoints by number, and whether they are whole.

A folder never holds files of two runs side by side: one with another config is refused, or moved aside.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import yaml

from spmd_rl.config import Config, ConfigError, as_dict
from spmd_rl.files import WRITING, files_below, replacing, sha256, sync_to_disk

METRICS, CONFIG, MEMORY = "metrics.jsonl", "config.yaml", "memory.jsonl"
CHECKPOINTS, ROLLOUTS = "checkpoints", "rollouts"
STATE, MANIFEST = "state.json", "manifest.json"
POLICY, REFERENCE = "policy", "reference"
# What the program writes into a run's folder: this and nothing else is moved aside.
OWN_NAMES = re.compile(r"(metrics\.jsonl|memory\.(jsonl|png)|config\.yaml|summary\.json|report\.(html|png)|tensorboard"
                       r"|checkpoints|completions\.jsonl|rollouts|profile|wandb|eval\.json|eval_samples\.jsonl"
                       r"|export(-\d+)?)(\.writing|\.replaced)?")
CHECKPOINT_NAME = re.compile(r"step-(\d+)")
EARLIER_NAME = re.compile(r"earlier-(\d+)")
# Options that a run may change when it goes on: they change how far it runs, where and how fast, not what it computes.
FREE_SECTIONS = ("mesh", "memory", "weight_sync", "checkpoint", "metrics")
FREE_FIELDS = ("run.output_dir", "run.max_steps", "run.max_train_minutes", "run.record_rollouts", "policy.zero_stage",
               "policy.gradient_checkpointing", "policy.gradient_checkpointing_every", "policy.compile_layers",
               "policy.logprob_memory_gib", "batch.max_tokens_per_microbatch", "batch.shared_prompt",
               "rollout.tensor_parallel_size", "rollout.gpu_memory_utilization", "rollout.enforce_eager",
               "rollout.cpu_kv_cache_gib", "rollout.kv_cache_gib", "evaluate.eval_steps",
               "run.profile_steps", "rewards.num_workers", "rewards.timeout_s", "rewards.memory_gib")


# Before anything starts. --------------------------------------------------------------------------------------------


def check(config: Config) -> None:
    """Refuse a folder of another run, and a checkpoint of another optimizer; reads only. Raises ConfigError."""
    resume, folder = config.checkpoint.resume, config.run.output_dir
    if resume == "never":
        return
    if resume != "auto":
        if not os.path.isfile(os.path.join(resume, STATE)):
            raise ConfigError(f"checkpoint.resume is {resume!r}: no checkpoint there; give a folder "
                              f".../{CHECKPOINTS}/step-N, or auto, or never")
        _check_optimizer(resume, config)
        return
    if not has_run(folder):
        return
    fields = differing_fields(_read_yaml(os.path.join(folder, CONFIG)), config)
    if fields:
        raise ConfigError(f"run.output_dir is {folder!r}: it holds a run with another config ({'; '.join(fields)}); "
                          "set another folder, or --checkpoint.resume never, which moves that run's files aside, or "
                          "the same values to go on with it")


def _check_optimizer(path: str, config: Config) -> None:
    then, now = read_state(path)["config"]["policy"]["optimizer"], config.policy.optimizer
    if then != now:
        raise ConfigError(f"policy.optimizer is {now!r}: checkpoint {path} was written with {then!r}, whose states are "
                          f"others. Set {then}, or begin a new run from an export of it (spmd-rl export, then "
                          "model.path and another run.output_dir)")


def differing_fields(earlier: dict[str, Any], config: Config) -> list[str]:
    """`section.name A there, B here` for each option that differs and matters; one that `earlier` lacks has its
    default there."""
    now, default = as_dict(config), as_dict(Config())
    found = []
    for section, values in now.items():
        if section in FREE_SECTIONS:
            continue
        then = earlier.get(section, {})
        for key in sorted(values.keys() | then.keys()):
            name = f"{section}.{key}"
            before = then.get(key, default[section].get(key))
            if name not in FREE_FIELDS and before != values.get(key):
                found.append(f"{name} {before!r} there, {values.get(key)!r} here")
    return found


def has_run(folder: str) -> bool:
    """Whether a run has left results there; a config alone is none."""
    metrics = os.path.join(folder, METRICS)
    return bool(checkpoints(folder)) or (os.path.exists(metrics) and os.path.getsize(metrics) > 0)


# Checkpoints. -------------------------------------------------------------------------------------------------------


def checkpoint_path(folder: str, step: int) -> str:
    """The folder of the checkpoint after `step` steps."""
    return os.path.join(folder, CHECKPOINTS, f"step-{step}")


def checkpoints(folder: str) -> list[str]:
    """Paths of a run's checkpoints, the newest by number first; those that were not finished have another name."""
    try:
        names = os.listdir(os.path.join(folder, CHECKPOINTS))
    except FileNotFoundError:
        return []
    numbers = sorted((int(match[1]) for name in names if (match := CHECKPOINT_NAME.fullmatch(name))), reverse=True)
    return [checkpoint_path(folder, number) for number in numbers]


def read_state(path: str) -> dict[str, Any]:
    """The checkpoint's state.json."""
    with open(os.path.join(path, STATE), encoding="utf-8") as file:
        return json.load(file)


def write_manifest(folder: str, entries: dict[str, dict[str, Any]]) -> None:
    """Name, size and checksum of each file, durably: `entries` as from `manifest_entries`."""
    with open(os.path.join(folder, MANIFEST), "w", encoding="utf-8") as file:
        json.dump({"files": entries}, file, indent=1)
    sync_to_disk(os.path.join(folder, MANIFEST))


def manifest_entries(folder: str, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """{name: {bytes, sha256}}."""
    paths = {name: os.path.join(folder, name) for name in names}
    return {name: {"bytes": os.path.getsize(path), "sha256": sha256(path)} for name, path in paths.items()}


def fault(path: str, share: Callable[[list[str]], Sequence[str]] = lambda names: names) -> str | None:
    """What is wrong with a checkpoint, or None for a whole one: missing files, other sizes, other bytes.

    share: the part of the names whose bytes are read here; names and sizes are all looked at.
    """
    try:
        with open(os.path.join(path, MANIFEST), encoding="utf-8") as file:
            wanted = json.load(file)["files"]
        missing = sorted(wanted.keys() - set(files_below(path)))
        if missing:
            return f"{', '.join(missing)} missing"
        for name, entry in wanted.items():
            size = os.path.getsize(os.path.join(path, name))
            if size != entry["bytes"]:
                return f"{name} has {size} bytes, not {entry['bytes']}"
        for name in share(sorted(wanted)):
            if sha256(os.path.join(path, name)) != wanted[name]["sha256"]:
                return f"{name} has other bytes than were written (sha256)"
    except (OSError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def newest_whole(source: str) -> str:
    """The checkpoint `source`, or the newest whole one of the run in that folder. Raises ConfigError."""
    paths = [source] if os.path.isfile(os.path.join(source, STATE)) else checkpoints(source)
    faults = []
    for path in paths:
        if (found := fault(path)) is None:
            return path
        faults.append(f"{path}: {found}")
    raise ConfigError(f"{source} has no whole checkpoint" + (f" ({'; '.join(faults)})" if faults else
                      ": give the folder of a run, or of a checkpoint"))


def remove_old(folder: str, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints, and what cut-off writing and removing left.

    The newest stays in any case; names that are not the program's stay too.
    """
    for path in checkpoints(folder)[max(keep, 1):]:
        # Renamed first: a removal that is cut off leaves no folder that looks like a broken checkpoint.
        os.rename(path, path + ".removed")
    parent = os.path.join(folder, CHECKPOINTS)
    for name in os.listdir(parent):
        base, dot, ending = name.partition(".")
        if CHECKPOINT_NAME.fullmatch(base) and dot + ending in (".removed", ".replaced", WRITING):
            shutil.rmtree(os.path.join(parent, name))


# Opening the folder for a run. --------------------------------------------------------------------------------------


def open_folder(config: Config, checkpoint: str | None) -> str:
    """Make the run's folder ready, with the resolved config; returns it. One rank calls it.

    Without a checkpoint an earlier run's files go into the next earlier-N. With one, the metrics are those up to its
    step, and this folder's later checkpoints go aside.
    """
    folder = config.run.output_dir
    os.makedirs(folder, mode=0o700, exist_ok=True)
    own = checkpoint is not None and _same(os.path.dirname(os.path.dirname(os.path.abspath(checkpoint))), folder)
    if own:
        assert checkpoint is not None
        number = read_state(checkpoint)["step"]
        later = [path for path in checkpoints(folder) if int(path.rpartition("-")[2]) > number]
        _set_aside(folder, [os.path.relpath(path, folder) for path in later])
    elif has_run(folder):
        _set_aside(folder, [name for name in os.listdir(folder) if OWN_NAMES.fullmatch(name)])
    if checkpoint is not None:
        with (open(os.path.join(checkpoint, METRICS), encoding="utf-8") as history,
              replacing(os.path.join(folder, METRICS)) as file):
            shutil.copyfileobj(history, file)
    with replacing(os.path.join(folder, CONFIG)) as file:
        yaml.safe_dump(as_dict(config), file, sort_keys=False)
    return folder


def _same(a: str, b: str) -> bool:
    return os.path.realpath(a) == os.path.realpath(b)


def _set_aside(folder: str, names: Sequence[str]) -> None:
    """Move files of `folder` to the same names in its next earlier-N."""
    if not names:
        return
    numbers = [int(match[1]) for name in os.listdir(folder) if (match := EARLIER_NAME.fullmatch(name))]
    aside = os.path.join(folder, f"earlier-{max(numbers, default=0) + 1}")
    for name in names:
        os.makedirs(os.path.dirname(os.path.join(aside, name)), exist_ok=True)
        os.rename(os.path.join(folder, name), os.path.join(aside, name))


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            return yaml.safe_load(file) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} of the earlier run cannot be read ({error}): set another run.output_dir, or "
                          "--checkpoint.resume never, which moves that run's files aside") from None


def open_memory_timeline(folder: str) -> TextIO:
    """Where one rank writes who is on its device at each change of phase; a run that goes on adds to it."""
    return open(os.path.join(folder, MEMORY), "a", encoding="utf-8")
