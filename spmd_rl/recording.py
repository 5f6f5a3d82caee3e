"""A step's rollouts on disk, so that the learning half can run again without an engine.

One file a step, `step-N.jsonl`, one completion a line, in order, with all that the step knows of it. Numbers come back
bit for bit.
"""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict

from spmd_rl.batch import Completion
from spmd_rl.config import ConfigError
from spmd_rl.files import WRITING, sync_to_disk

NAME = re.compile(r"step-(\d+)\.jsonl")


class Recorder:
    """Writes rollouts into a folder."""

    def __init__(self, folder: str) -> None:
        os.makedirs(folder, exist_ok=True)
        self._folder = folder

    def write(self, step: int, completions: Sequence[Completion]) -> None:
        """Step number `step` (from 0), of all ranks, with rewards and advantages; a file is whole or not there."""
        path = os.path.join(self._folder, f"step-{step}.jsonl")
        with open(path + WRITING, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(c)) + "\n" for c in completions)
        sync_to_disk(path + WRITING)
        os.replace(path + WRITING, path)


def recorded_steps(folder: str) -> list[str]:
    """Paths of the recorded steps in order. Raises ConfigError where there is none."""
    try:
        names = os.listdir(folder)
    except OSError:
        names = []
    numbers = sorted(int(match[1]) for name in names if (match := NAME.fullmatch(name)))
    if not numbers:
        raise ConfigError(f"run.replay is {folder!r}: no step-N.jsonl there; give the `rollouts` folder of a run that "
                          "was started with --record_rollouts")
    return [os.path.join(folder, f"step-{number}.jsonl") for number in numbers]


def read_step(path: str) -> list[Completion]:
    """The step's completions. Raises ConfigError for a file that does not hold such."""
    completions = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                completions.append(Completion(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise ConfigError(f"{path}, line {number}: not a recorded completion ({error})") from None
    if not completions:
        raise ConfigError(f"{path}: no completions in it")
    return completions
