"""Profiles of single steps: for each rank a torch trace with the phases named and, on a GPU, an allocator snapshot.

The trace opens in https://ui.perfetto.dev, the snapshot in https://pytorch.org/memory_viz.
"""

import contextlib
import os
import re
from collections.abc import Iterator

from spmd_rl.config import ConfigError

SNAPSHOT_ENTRIES = 200_000


def profiled_steps(text: str) -> set[int]:
    """The steps (from 1) that "3", "3-5" or "3,8" names. Raises ConfigError."""
    steps: set[int] = set()
    for part in text.replace(" ", "").split(",") if text.strip() else []:
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last:
            raise ConfigError(f"run.profile_steps is {text!r}: write steps from 1 on, as 3 or 3-5 or 3,8")
        steps |= set(range(first, last + 1))
    return steps


class Profiler:
    """Profiles the steps that were asked for."""

    def __init__(self, steps: str, folder: str, rank_name: str, is_cuda: bool) -> None:
        self._steps, self._is_cuda = profiled_steps(steps), is_cuda
        self._folder, self._rank_name = os.path.join(folder, "profile"), rank_name

    @contextlib.contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Profile the block if the step (from 1) is one of them: profile/step-N-rank-R.json.gz and .pickle."""
        if step not in self._steps:
            yield
            return
        import torch
        from torch.profiler import ProfilerActivity, profile

        os.makedirs(self._folder, exist_ok=True)
        path = os.path.join(self._folder, f"step-{step}-{self._rank_name}")
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._is_cuda
        if self._is_cuda:
            # Python's frames alone: those of C++ are slow to name, and as large again.
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=SNAPSHOT_ENTRIES)
        with profile(activities=activities, record_shapes=True) as profiler:
            yield
        if self._is_cuda:
            torch.cuda.memory._dump_snapshot(f"{path}.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
        profiler.export_chrome_trace(f"{path}.json.gz")
