"""Policy checkpoints at every ZeRO stage and type: loaded is what was saved, and training goes on bit by bit."""

import json

import pytest
import torch
from launching import ROOT, Once, torchrun
from transformers import AutoModelForCausalLM
from worker_checkpoint import digest

from spmd_rl import run_folder
from spmd_rl.export import export_checkpoint
from spmd_rl.model import weight_files
from spmd_rl.shards import Shards

WORKER = str(ROOT / "tests" / "dist" / "worker_checkpoint.py")
# The smallest weights stay whole between forwards.
SECOND = {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 1000}
CELLS = [dict(name=f"{dtype}-{stage}", stage=stage, dtype=dtype, skips=dtype == "bfloat16")
         for dtype in ("float32", "bfloat16") for stage in (0, 1, 2, 3)]
# A reference that moves: whole on each rank beside stages 0 to 2, sharded beside 3.
CELLS += [dict(name=f"reference-{stage}", stage=stage, dtype="float32", reference=True) for stage in (2, 3)]
# States on the host, several optimizer groups of one shard.
CELLS += [dict(name=name, stage=int(name[-1]), dtype="bfloat16", raw=raw) for name, raw in {
    "offload-2": {"offload_optimizer": {"device": "cpu"}}, "offload-3": {"offload_optimizer": {"device": "cpu"}},
    "groups-3": {"sub_group_size": 50_000}, "second-shards-3": SECOND}.items()]
CELLS.append(dict(name="reference-second-shards-3", stage=3, dtype="float32", reference=True, raw=SECOND))
BY_NAME = {cell["name"]: cell for cell in CELLS}
NAMES = list(BY_NAME)
CORE = ["float32-2", "bfloat16-0", "bfloat16-1", "bfloat16-3", "reference-3", "reference-second-shards-3"]
# (ranks, cells of one launch)
LAUNCHES = [(2, CORE), *(pytest.param((ranks, NAMES), marks=pytest.mark.long) for ranks in (2, 1))]
# Ranks that go on with what two ranks wrote -> (cell, stage there).
CORE_MOVES = {1: [("bfloat16-3", 0), ("float32-2", 2)], 2: [("float32-2", 3), ("bfloat16-0", 1), ("reference-3", 2)],
              4: [("bfloat16-1", 3)]}
# Those of fp32 first.
ALL_MOVES = [(name, stage) for name in NAMES if "raw" not in BY_NAME[name]
             for stage in ((2, 3) if "reference" in name else (0, 1, 2, 3))]


class Launches:
    """What each rank found, and the run folder, of each cell; a launch's when first asked for."""

    def __init__(self, model, base):
        self._model, self._base = model, base
        self.straight, self.moved = Once(self._straight), Once(self._moved)

    def _straight(self, num_ranks, *names):
        return self._launch(num_ranks, f"{num_ranks}-{len(names)}", [BY_NAME[name] for name in names])

    def _moved(self, num_ranks, *moves):
        """The moves' cells as (what was found, run folder, what the source found, its run folder)."""
        core = len(moves) < 4
        sources = self.straight(2, *(CORE if core else NAMES))
        cells = [BY_NAME[name] | {"name": f"{name}-to-{stage}", "stage": stage, "source": str(sources[name][1])}
                 for name, stage in moves]
        found = self._launch(num_ranks, f"moves-{num_ranks}-{len(moves)}", cells)
        return {(name, stage): (*found[f"{name}-to-{stage}"], *sources[name]) for name, stage in moves}

    def _launch(self, num_ranks, folder_name, cells):
        folder = self._base / folder_name
        folder.mkdir()
        (folder / "job.json").write_text(json.dumps({"model": str(self._model), "folder": str(folder), "cells": cells}))
        torchrun(num_ranks, [WORKER, str(folder / "job.json")], timeout_s=500).succeeded()
        found = {cell["name"]: (json.loads((folder / f"{cell['name']}.json").read_text()), folder / cell["name"])
                 for cell in cells}
        assert all(len(ranks) == num_ranks for ranks, _ in found.values())
        return found


@pytest.fixture(scope="module")
def launches(models, tmp_path_factory):
    return Launches(models["tied"], tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(params=LAUNCHES, ids=["2 ranks, core", "2 ranks", "1 rank"])
def cells(request, launches):
    """[(what each rank found, run folder)] of the cells of one launch."""
    num_ranks, names = request.param
    return list(launches.straight(num_ranks, *names).values())


@pytest.fixture(params=[*CORE_MOVES, *(pytest.param(-n, marks=pytest.mark.long) for n in CORE_MOVES)],
                ids=lambda n: f"{abs(n)} ranks{', all' * (n < 0)}")
def moved(request, launches):
    """Cells of two ranks that other ranks, or another stage, went on with."""
    num_ranks = abs(request.param)
    moves = CORE_MOVES[num_ranks] if request.param > 0 else ALL_MOVES if num_ranks < 4 else ALL_MOVES[16:]
    return launches.moved(num_ranks, *moves).values()


def test_what_is_loaded_is_what_was_saved(cells):
    """Weights, masters and moments of each rank, by their bytes, in a fresh engine; also from a resumed one's save. The
    checkpoint of step 2 was written beside step 3, which changed all of them meanwhile."""
    for found in (rank for ranks, _ in cells for rank in ranks):
        for loaded, saved in (("loaded", found["straight"][1]), ("loaded again", found["resumed"][0])):
            assert found[loaded] == {name: saved[name] for name in ("weights", "optimizer")}


def test_second_shards_change_no_bit(launches):
    """ZeRO++'s hpZ with a reference that moves after each step: DeepSpeed would go on with what a weight was before."""
    cells = launches.straight(2, *CORE)
    with_second, without = (cells[name][0] for name in ("reference-second-shards-3", "reference-3"))
    assert [rank["straight"] for rank in with_second] == [rank["straight"] for rank in without]
    assert all(step["kl"] > 0 for step in without[0]["straight"][2:])  # the first learning rate is 0


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
    """Of all saves the newest are there, as many as are kept, whole, and nothing half-written."""
    for ranks, folder in cells:
        kept = ["step-2", "step-3"] + ["step-6"] * ("counts" in ranks[0])
        assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == kept
        assert {run_folder.fault(path) for path in run_folder.checkpoints(str(folder))} == {None}
        state = run_folder.read_state(str(folder / "checkpoints" / "step-3"))
        assert (state["step"], state["world_size"]) == (3, len(ranks))


def test_steps_that_were_skipped_count_on(cells):
    """Gradients that are not finite in a row end a run; a resume between two of them is no way around that. The
    schedule stands where it stood, and updates are counted."""
    counted = [found["counts"] for ranks, _ in cells for found in ranks if "counts" in found]
    assert counted
    for saved, loaded in counted:
        assert saved == loaded
        assert (saved["num_updates"], saved["nonfinite_in_a_row"], saved["schedule_steps"]) == (6, 1, 5)


def test_another_learning_rate_is_taken_over(cells):
    """A run that goes on with another one has its own schedule, at the step where that one stood."""
    for ranks, _ in cells:
        for found in ranks:
            if "counts" in found:
                wanted = 2 * found["straight"][3]["learning_rate"]
                assert found["learning rate of step 4, doubled"] == pytest.approx(wanted, rel=1e-12) and wanted > 0


def test_case_61_a_checkpoint_exports_what_the_policy_had(cells, tmp_path):
    """Whatever ranks and stage wrote it: plain Transformers finds each key once, in the type of the run, with the bytes
    of the weights after step 3; the tied head is not among them."""
    for ranks, folder in cells:
        if folder.name.startswith("reference"):
            continue  # its checksum is that of two models
        out = export_checkpoint(str(folder / "checkpoints" / "step-3"), str(tmp_path / folder.name))
        lm, info = AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        assert str(lm.dtype) == f"torch.{BY_NAME[folder.name]['dtype']}"
        assert "lm_head.weight" not in weight_files(out)
        assert digest([p.detach() for p in lm.parameters()]) == ranks[0]["resumed"][0]["weights"]


def assembled(path):
    """{(tensor, kind): value} of a checkpoint's policy and reference, whole."""
    found = {}
    for part in ("policy", "reference"):
        if not (path / part).exists():
            continue
        with Shards(str(path / part)) as shards:
            for name in shards.shapes:
                for kind in shards.kinds(name):
                    read = shards.scalar if shards.is_scalar(kind, name) else shards.whole
                    found[part, name, kind] = read(kind, name)
    return found


def test_case_66_another_layout_has_the_same_masters_and_moments(moved):
    """Loaded by other ranks or at another stage and saved again, each whole tensor has the bytes it had, and the count
    of steps its value; so have the weights, the reference's among them."""
    for found, folder, source, source_folder in moved:
        saved, wanted = (assembled(f / "checkpoints" / "step-2") for f in (folder, source_folder))
        assert saved.keys() == wanted.keys()
        assert {kind for _, _, kind in wanted} >= {"master", "exp_avg", "exp_avg_sq", "step"}
        assert all(torch.equal(saved[key], wanted[key]) for key in wanted)
        assert all(rank["loaded"]["weights"] == source[0]["straight"][1]["weights"] for rank in found)


def test_case_66_another_layout_learns_on(moved):
    """Steps 3 to 5 are those of the run that was never moved: the learning rate exactly, in fp32 the rest to 1e-5, and
    in bf16, whose gradients are summed in another order, to 2 %."""
    for found, folder, source, _ in moved:
        tolerance = 2e-2 if "bfloat16" in folder.name else 1e-5
        for rank in found:
            for step, want in zip(rank["resumed"], source[0]["straight"][2:], strict=True):
                assert step["learning_rate"] == want["learning_rate"]
                for name in ("loss", "grad_norm", "entropy"):
                    assert step[name] == pytest.approx(want[name], rel=tolerance, abs=tolerance), (folder.name, name)
