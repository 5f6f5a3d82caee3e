"""Checkpoints of states on a GPU: copies to pinned memory while kernels run, and what comes back."""

import json
import os

import launching
import pytest
import torch

from spmd_rl.shards import HostBuffers, Piece

pytestmark = pytest.mark.gpu
CELLS = [dict(name=f"bfloat16-{stage}", stage=stage, dtype="bfloat16") for stage in (0, 1, 2, 3)]
CELLS += [dict(name=f"offload-{stage}", stage=stage, dtype="bfloat16", raw={"offload_optimizer": {"device": "cpu"}})
          for stage in (2, 3)]
NAMES = [cell["name"] for cell in CELLS]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """name -> what the rank found."""
    folder = tmp_path_factory.mktemp("checkpoints")
    model = launching.make_model(folder / "model", tied=True)
    (folder / "job.json").write_text(json.dumps({"model": str(model), "folder": str(folder), "cells": CELLS,
                                                 "device": "cuda"}))
    there = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join([str(launching.ROOT), str(launching.ROOT / "tests" / "dist"), there])
    launching.run([str(launching.ROOT / "tests" / "dist" / "worker_checkpoint.py"), str(folder / "job.json")],
                  env={"PYTHONPATH": path}, timeout_s=500).succeeded()
    return {name: json.loads((folder / f"{name}.json").read_text())[0] for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_loaded_is_what_was_saved(found, name):
    """Weights, masters, moments and counts, bit by bit, of a save beside the step that changed them all, and of one in
    the step."""
    for loaded, saved in (("loaded", found[name]["straight"][1]), ("loaded again", found[name]["resumed"][0])):
        assert found[name][loaded] == {key: saved[key] for key in ("weights", "optimizer")}


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_policy_learns_on_as_if_uninterrupted(found, name):
    """With deterministic kernels steps 3 to 5 are those of the straight run, after one resume and another."""
    assert found[name]["resumed"] + found[name]["resumed again"] == found[name]["straight"][2:]


@pytest.mark.parametrize("name", NAMES)
def test_generators_go_on_where_they_were(found, name):
    """Python's, NumPy's, torch's and the GPU's."""
    assert len(found[name]["draws"]) == 4 and found[name]["draws after"] == found[name]["draws"]


def test_copies_are_of_the_moment_and_in_pinned_memory():
    """Kernels that are queued before the copy are in it, those after it are not."""
    buffers = HostBuffers(pinned=True)
    value = torch.zeros(2**24, device="cuda")
    for round_ in range(1, 4):
        for _ in range(100):
            value.add_(0.01 * round_)
        wanted = value.clone()
        copy, = buffers.copy([Piece("master", "a", 0, value)])
        value.zero_()
        assert copy.tensor.is_pinned() and torch.equal(copy.tensor, wanted.cpu())
