"""Policy checkpoints at every ZeRO stage and type: loaded is what was saved, and training goes on bit by bit."""

import json

import pytest
from launching import ROOT, torchrun

from spmd_rl import run_folder

WORKER = str(ROOT / "tests" / "dist" / "worker_checkpoint.py")
CELLS = [dict(name=f"{dtype}-{stage}", stage=stage, dtype=dtype) for dtype in ("float32", "bfloat16")
         for stage in (0, 1, 2, 3)]
# A reference that moves: whole on each rank beside stages 0 to 2, sharded beside 3.
CELLS += [dict(name=f"reference-{stage}", stage=stage, dtype="float32", reference=True) for stage in (2, 3)]
NAMES = [cell["name"] for cell in CELLS]
# (ranks, cells of one launch)
LAUNCHES = [(2, ["float32-2", "bfloat16-0", "bfloat16-1", "bfloat16-3", "reference-3"]),
            pytest.param((2, NAMES), marks=pytest.mark.long), pytest.param((1, NAMES), marks=pytest.mark.long)]


@pytest.fixture(scope="module", params=LAUNCHES, ids=["2 ranks, core", "2 ranks", "1 rank"])
def cells(request, models, tmp_path_factory):
    """[(what each rank found, run folder)] of the cells of one launch."""
    num_ranks, names = request.param
    folder = tmp_path_factory.mktemp("checkpoints")
    job = {"model": str(models["tied"]), "folder": str(folder), "cells": [c for c in CELLS if c["name"] in names]}
    (folder / "job.json").write_text(json.dumps(job))
    torchrun(num_ranks, [WORKER, str(folder / "job.json")], timeout_s=400).succeeded()
    found = [(json.loads((folder / f"{name}.json").read_text()), folder / name) for name in names]
    assert all(len(ranks) == num_ranks for ranks, _ in found)
    return found


def test_what_is_loaded_is_what_was_saved(cells):
    """Weights, masters and moments of each rank, by their bytes, in a fresh engine; also from a resumed one's save."""
    for found in (rank for ranks, _ in cells for rank in ranks):
        for loaded, saved in (("loaded", found["straight"][1]), ("loaded again", found["resumed"][0])):
            assert found[loaded] == {name: saved[name] for name in ("weights", "optimizer")}


def test_case_62_a_resumed_policy_learns_on_as_if_uninterrupted(cells):
    """Loss, gradient norm, learning rate, weights and optimizer of steps 3 to 5 are those of the straight run, bit by
    bit, after one resume at 2 and another at 3."""
    for found in (rank for ranks, _ in cells for rank in ranks):
        assert found["resumed"] + found["resumed again"] == found["straight"][2:]
        assert len({step["optimizer"] for step in found["straight"]}) == 5, "nothing was learned"
        assert len({step["learning_rate"] for step in found["straight"]}) > 2, "the schedule stands still"


def test_generators_go_on_where_they_were(cells):
    """Python's, NumPy's and torch's next draws, on each rank its own."""
    for ranks, _ in cells:
        assert all(found["draws after"] == found["draws"] for found in ranks)
        assert len({tuple(found["draws"]) for found in ranks}) == len(ranks)


def test_case_77_masters_are_finer_than_the_weights(cells):
    """In bf16 what is saved and loaded bit by bit are fp32 masters, not what bf16 rounds them to."""
    finer = [found["masters are finer"] for ranks, _ in cells for found in ranks if "masters are finer" in found]
    assert finer and all(finer)


def test_checkpoints_are_whole_and_the_newest_stay(cells):
    """Of the saves after 1, 2 and 3 the newest two are there, whole, and nothing half-written."""
    for ranks, folder in cells:
        assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-2", "step-3"]
        assert [run_folder.fault(path) for path in run_folder.checkpoints(str(folder))] == [None, None]
        state = run_folder.read_state(str(folder / "checkpoints" / "step-3"))
        assert (state["step"], state["world_size"]) == (3, len(ranks))
