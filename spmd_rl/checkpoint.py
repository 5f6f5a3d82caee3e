"""Resumable checkpoints: everything that a run needs to go on as if it had not stopped.

    checkpoints/step-N/
        policy/         fp32 masters and the optimizer's states, in pieces: each rank those that it holds
        reference/      weights of a reference that moves, likewise
        rank-R.pt       generators of rank R
        metrics.jsonl   the metrics up to this step
        state.json      steps done, version of the weights, the engine's counts, ranks, config
        manifest.json   size and sha256 of each file

Weights are what masters round to; prompts and request seeds follow from the step alone. The folder has another name
until all of it is on disk.
"""

import json
import os
import shutil
import threading
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from spmd_rl import run_folder, shards
from spmd_rl.config import Config, ConfigError, as_dict
from spmd_rl.files import WRITING, files_below, replace_folder, sync_to_disk
from spmd_rl.mesh import Mesh, generator_states, restore_generators, say_once
from spmd_rl.policy import Policy, Reference
from spmd_rl.run_folder import POLICY, REFERENCE
from spmd_rl.shards import HostBuffers, Piece

Entries = dict[str, dict[str, Any]]
SEEN_WITHIN_S = 75.0  # NFS caches a folder's names for up to 60 s


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


@dataclass
class Snapshot:
    """What one rank writes of a checkpoint."""

    folder: str
    files: list[str]
    """Names of those that are there already."""
    pieces: dict[str, list[Piece]]
    """Sub-folder -> pieces."""
    shapes: dict[str, tuple[int, ...]]
    rank_name: str
    """Name of this rank's files."""
    generators: dict[str, Any]

    def write(self) -> Entries:
        """Write and sync this rank's files; returns their entries of the manifest."""
        names = list(self.files)
        for part, pieces in self.pieces.items():
            written = shards.write(os.path.join(self.folder, part), self.rank_name, pieces, self.shapes)
            names += [f"{part}/{name}" for name in written]
        names.append(f"{self.rank_name}.pt")
        torch.save(self.generators, os.path.join(self.folder, names[-1]))
        for name in names:
            sync_to_disk(os.path.join(self.folder, name))  # what a host wrote, only that host can bring to disk
        return run_folder.manifest_entries(self.folder, names)


@dataclass
class Pending:
    """A checkpoint that is being written."""

    folder: str
    thread: threading.Thread
    entries: Entries = field(default_factory=dict)
    """This rank's, once the thread has ended."""


class Saver:
    """Writes a run's checkpoints: in the step, or with checkpoint.background beside the steps that follow."""

    def __init__(self, config: Config, mesh: Mesh, policy: Policy, reference: Reference | None) -> None:
        """reference: written where loss.ref_model_sync_steps moves it; otherwise it is the model of the start."""
        self._config, self._mesh, self._policy = config, mesh, policy
        self._reference = reference if config.loss.ref_model_sync_steps else None
        self._buffers = {part: HostBuffers(pinned=mesh.device.type == "cuda") for part in (POLICY, REFERENCE)}
        self._pending: Pending | None = None

    def save(self, progress: Progress) -> None:
        """Write checkpoints/step-N, then remove those beyond checkpoint.keep. Collective.

        In the background it returns once the tensors are copied to host memory; the checkpoint gets its name in
        `advance` or `finish`. An error on any rank leaves the earlier checkpoints as they are, and ends the run on all
        ranks.
        """
        self.finish()  # two at a time would share the host buffers
        folder = run_folder.checkpoint_path(self._config.run.output_dir, progress.step)
        files: list[str] = []
        for path in self._mesh.on_main(lambda: [folder + WRITING]):
            shutil.rmtree(path, ignore_errors=True)  # left by a run that was killed while it wrote
            for part in self._parts():
                os.makedirs(os.path.join(path, part))
            files = self._write_state(path, progress)
        self._mesh.barrier()  # the folder is there before the others write into it
        snapshot = Snapshot(folder + WRITING, files, {part: list(engine.pieces()) for part, engine in
                                                      self._parts().items()},
                            self._policy.shapes(), self._rank_name(), generator_states())
        if not self._config.checkpoint.background:
            self._complete(folder, snapshot.write())
            return
        snapshot.pieces = {part: self._buffers[part].copy(pieces) for part, pieces in snapshot.pieces.items()}
        self._pending = Pending(folder, threading.Thread(target=self._write, args=(snapshot,), name="checkpoint"))
        self._pending.thread.start()

    def _write(self, snapshot: Snapshot) -> None:
        """Runs beside the steps: no collectives here, whose order the ranks could not agree on."""
        assert self._pending
        try:
            self._pending.entries = snapshot.write()
        except BaseException as error:
            self._mesh.fail(error, "save")  # at once: the next step's end may be minutes away

    def advance(self) -> None:
        """Between two steps: give the checkpoint that all ranks have written its name. Collective."""
        if self._pending and self._mesh.all_true(not self._pending.thread.is_alive()):
            self.finish()

    def finish(self) -> None:
        """Wait for what is being written. Collective."""
        if self._pending:
            self._pending.thread.join()
            folder, entries = self._pending.folder, self._pending.entries
            self._pending = None
            self._complete(folder, entries)

    def _complete(self, folder: str, entries: Entries) -> None:
        parts = self._mesh.all_gather(entries)  # all have written, too
        for path in self._mesh.on_main(lambda: [folder]):
            written = {name: entry for part in parts for name, entry in part.items()}
            _await_files(path + WRITING, written.keys())
            run_folder.write_manifest(path + WRITING, written)
            replace_folder(path)
            run_folder.remove_old(self._config.run.output_dir, self._config.checkpoint.keep)
        self._mesh.barrier()  # a rank that goes on may be killed: the checkpoint has its name by then

    def _parts(self) -> dict[str, Any]:
        return {POLICY: self._policy} | ({REFERENCE: self._reference} if self._reference else {})

    def _rank_name(self) -> str:
        return self._mesh.mine([f"rank-{number}" for number in range(self._mesh.world_size)])

    def _write_state(self, folder: str, progress: Progress) -> list[str]:
        config = self._config
        state = asdict(progress) | {"policy": self._policy.progress(), "world_size": self._mesh.world_size,
                                    "config": as_dict(config)}
        with open(os.path.join(folder, run_folder.STATE), "w", encoding="utf-8") as file:
            json.dump(state, file, indent=1)
        shutil.copyfile(os.path.join(config.run.output_dir, run_folder.METRICS),
                        os.path.join(folder, run_folder.METRICS))
        return [run_folder.STATE, run_folder.METRICS]


def _await_files(folder: str, names: Collection[str]) -> None:
    """Return once all are seen here, other hosts' too. Raises RuntimeError where that does not come."""
    deadline = time.monotonic() + SEEN_WITHIN_S
    while unseen := sorted(set(names) - set(files_below(folder))):
        if time.monotonic() >= deadline:
            raise RuntimeError(f"{folder} lacks {', '.join(unseen)}, which other ranks have written: is run.output_dir "
                               "on a file system that all hosts share?")
        time.sleep(0.5)  # a network's file system looks for other hosts' new files now and then only


def load(path: str, policy: Policy, reference: Reference | None) -> Progress:
    """Bring policy and reference to the checkpoint's state, whatever the ranks and stage that wrote it; returns where
    that run stood. Collective."""
    state: dict[str, Any] = run_folder.read_state(path)
    policy.load(os.path.join(path, POLICY), state["policy"])
    if reference and os.path.exists(os.path.join(path, REFERENCE)):
        reference.load(os.path.join(path, REFERENCE))
    return Progress(**{name: state[name] for name in asdict(Progress())})


def load_generators(path: str, mesh: Mesh) -> None:
    """Put this rank's generators where they were; last of all, since building engines draws from them.

    A rank that the run had not keeps its own of the start.
    """
    own = os.path.join(path, mesh.mine([f"rank-{number}.pt" for number in range(mesh.world_size)]))
    if os.path.exists(own):
        restore_generators(torch.load(own, weights_only=True))
