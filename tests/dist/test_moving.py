"""Out and back leaves every bit of a training state as it was, and the steps after it those of a twin that never moved.

The mover is the same on a CPU as on a GPU, where only its streams and its pinned memory come in.
"""

import json

import pytest
from launching import ROOT, Once, torchrun

WORKER = str(ROOT / "tests" / "dist" / "worker_offload.py")
STAGES = [0, 1, 2, 3]
RANKS = [pytest.param(1, marks=pytest.mark.long), 2]


def cell(stage, dtype="bfloat16", optimizer="adamw", offload_optimizer=False, reference=False):
    return dict(stage=stage, dtype=dtype, optimizer=optimizer, offload_optimizer=offload_optimizer, reference=reference)


CELLS = {f"stage{stage}-{dtype}": cell(stage, dtype) for stage in STAGES for dtype in ("bfloat16", "float32")}
CELLS |= {f"stage{stage}-sgd": cell(stage, "float32", "sgd") for stage in (0, 2)}
CELLS |= {f"stage{stage}-offload": cell(stage, offload_optimizer=True) for stage in (2, 3)}
CELLS["stage3-second-shards"] = cell(3) | {"raw": {"zero_hpz_partition_size": 2,
                                                   "stage3_param_persistence_threshold": 100}}
TWINS = list(CELLS)
CELLS |= {f"reference{stage}": cell(stage, reference=True) for stage in (0, 3)}
REFERENCES = [name for name in CELLS if name not in TWINS]


@pytest.fixture(scope="module")
def moved(models, tmp_path_factory):
    def launch(num_ranks):
        folder = tmp_path_factory.mktemp(f"moved-{num_ranks}")
        job = folder / "job.json"
        job.write_text(json.dumps(dict(model=str(models["tied"]), device="cpu", cells=CELLS)))
        torchrun(num_ranks, [WORKER, str(job)]).succeeded()
        return json.loads((folder / "results.json").read_text())
    return Once(launch)


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_moving_changes_no_bit(moved, num_ranks, name):
    """Two parameter groups, ragged rows; moved before, between and after 4 steps, in whole and by tenant."""
    for found in moved(num_ranks)[name]:
        assert found["trained"]
        assert not found["differs"]


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_nothing_is_left_on_the_device(moved, num_ranks, name):
    """Every storage of the tenants that left has 0 bytes, and each tenant is there again afterwards."""
    for found in moved(num_ranks)[name]:
        assert found["left"] and not any(found["left"])
        assert found["tenants"]["weights"] > 400_000
        assert found["tenants"]["moments"] > 400_000 or "sgd" in name
        assert found["tenants"]["fp32 masters"] > 400_000 or name.startswith("stage0-") and "bf" not in name


@pytest.mark.parametrize("name", TWINS)
def test_a_move_that_fails_half_way_is_made_good(moved, name):
    """A copy fails, out or back; the next cycle gives the same bits (test_moving_changes_no_bit has them too)."""
    for found in moved(2)[name]:
        assert found["broken"], "no copy failed"


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_forward_only_engine_moves(moved, num_ranks, name):
    """DeepSpeed's own calls assert there: case 48."""
    for found in moved(num_ranks)[name]:
        assert found["rows"] and found["is_equal"] and not any(found["left"])
