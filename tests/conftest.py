"""Shared by all tests: the tools as modules, and the GPUs that a test asks for."""

import fcntl
import importlib.util
import os
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def load_tool(name):
    """tools/NAME.py as a module: the folder is no package."""
    spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gpus_needed(item):
    """GPUs that the markers of a test ask for."""
    needed = [1] if item.get_closest_marker("gpu") else [0]
    return max(needed + [mark.args[0] for mark in item.iter_markers("multi_gpu")])


def pytest_runtest_setup(item):
    """Skip what needs more GPUs than this machine has, and say so."""
    needed = gpus_needed(item)
    if needed:
        import torch

        found = torch.cuda.device_count()
        if found < needed:
            pytest.skip(f"needs {needed} GPU{'s' * (needed > 1)}, found {found}")


@pytest.fixture(scope="session")
def tool_named():
    """A function from NAME to tools/NAME.py as a module."""
    return load_tool


@pytest.fixture(scope="session")
def make_model():
    """tools/make_model.py: `build_model`, `make_tokenizer`, `save`."""
    return load_tool("make_model")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """A test marked `serial` runs alone: it takes a lock for itself that the other workers' tests share."""
    run_id = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    with open(Path(tempfile.gettempdir()) / f"spmd_rl-{run_id}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if item.get_closest_marker("serial") else fcntl.LOCK_SH)
        return (yield)
