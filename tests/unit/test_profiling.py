"""Profiles: which steps, and what a trace holds."""

import gzip
import json

import pytest

from spmd_rl.config import ConfigError, parse
from spmd_rl.metrics import Metrics
from spmd_rl.profiling import Profiler, profiled_steps


@pytest.mark.parametrize("text, steps", [("", set()), ("3", {3}), ("3-5", {3, 4, 5}), ("1, 4-5", {1, 4, 5})])
def test_steps_are_numbers_and_ranges(text, steps):
    """Counted from 1, as everywhere."""
    assert profiled_steps(text) == steps


@pytest.mark.parametrize("text", ["0", "x", "3-", "-3", "5-3", "3,,4", "1.5", "3 - x"])
def test_other_texts_are_refused(text):
    """ConfigError with the field and a way to write it."""
    with pytest.raises(ConfigError, match="run.profile_steps is .*3-5"):
        profiled_steps(text)


def test_the_short_option_is_the_field():
    """--profile 3-5 and --run.profile_steps 3-5 are one."""
    assert parse(["--profile", "3-5"])[0] == parse(["--run.profile_steps", "3-5"])[0]
    assert parse(["--profile", "3"])[0].run.profile_steps == "3"


def test_a_trace_has_the_phases_by_name(tmp_path, mesh):
    """Only of the steps asked for, a file a rank; the phases are in it as events with their time."""
    metrics = Metrics(mesh, [])
    profiler = Profiler("2", str(tmp_path), "rank-0", False)
    for step in (1, 2, 3):
        with profiler.around(step), metrics.timed("step"), metrics.timed("rollout"):
            pass
    path, = (tmp_path / "profile").iterdir()
    assert path.name == "step-2-rank-0.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert {"step", "rollout"} <= {event.get("name") for event in events if event.get("cat") == "user_annotation"}
