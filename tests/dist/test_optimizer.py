"""Optimizer steps at every stage and type: gradients that are not finite, and updates that bf16 alone would lose."""

import json
import math

import pytest
from launching import ROOT, Once, torchrun

WORKER = str(ROOT / "tests" / "dist" / "worker_optimizer.py")
STAGES = [0, 1, 2, 3]
DTYPES = ["float32", "bfloat16"]
CORE = [f"{what}-{dtype}-{stage}" for what in ("nonfinite", "small") for dtype in DTYPES for stage in STAGES]
TINY = [f"tiny-{dtype}-2" for dtype in DTYPES]


@pytest.fixture(scope="module")
def launched(models, tmp_path_factory):
    """A function from cells to (what each of two ranks found by cell, what was printed), one launch each."""
    def launch(*cells):
        folder = tmp_path_factory.mktemp("optimizer")
        finished = torchrun(2, [WORKER, str(models["tied"]), str(folder), *cells]).succeeded()
        return {cell: json.loads((folder / f"{cell}.json").read_text()) for cell in cells}, finished.output

    return Once(launch)


@pytest.fixture(scope="module")
def found(launched):
    """A function from a cell's name to what each rank found."""
    return lambda cell: launched(*(TINY if cell in TINY else CORE))[0][cell]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_that_is_not_finite_changes_nothing(found, dtype, stage):
    """NaN and infinity on one rank alone: both ranks skip, weights, masters and moments stay to the last bit, and the
    norm says what it was. Finite ones in between are applied."""
    for rank in found(f"nonfinite-{dtype}-{stage}"):
        steps = rank["steps"]
        assert [step["is_applied"] for step in steps] == [True, False, False, True, False, False]
        assert [math.isfinite(step["norm"]) for step in steps] == [step["is_applied"] for step in steps]
        states = [step["state"] for step in steps]
        assert states[0] == states[1] == states[2] != states[3] == states[4] == states[5]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_schedule_counts_steps_that_happened(found, dtype, stage):
    """Linear from 1e-3 over 10 steps: 1e-3, then 9e-4 until a step is applied, then 8e-4. AdamW's bias correction
    counts the same two steps (DeepSpeed's start at stage 0 in bf16 would count a third)."""
    for rank in found(f"nonfinite-{dtype}-{stage}"):
        assert rank["counted"] == [2]
        rates = [step["learning_rate"] for step in rank["steps"]]
        assert rates == pytest.approx([1e-3, 9e-4, 9e-4, 9e-4, 8e-4, 8e-4])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_of_them_in_a_row_ends_the_run(found, dtype, stage):
    """Two, an applied one and two more go on; the third in a row raises with step and phase, on both ranks."""
    for rank in found(f"nonfinite-{dtype}-{stage}"):
        assert rank["error"].startswith(f"step 7, phase nonfinite-{dtype}-{stage}: the gradient is not finite (norm ")
        assert rank["error"].endswith("3 in a row (policy.max_nonfinite_steps 3)")


def test_each_is_reported_once(launched):
    """One line a skipped step, from the first rank, with step, phase and how many in a row."""
    _, output = launched(*CORE)
    lines = [line for line in output.splitlines() if "warning: step " in line]
    assert len(lines) == 4 * len(STAGES) * len(DTYPES)
    for step, count in ((2, 1), (3, 2), (5, 1), (6, 2)):
        assert sum(f"step {step}, phase nonfinite" in line and f", {count} in a row" in line for line in lines) == 8


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_case_77_small_updates_add_up(found, dtype, stage):
    """A weight of 1 less ten times 1e-3: the master is 0.99, and its bf16 view 253/256. In bf16 alone each update is
    below half of the spacing and the weight stays 1. That masters outlive a checkpoint, test_checkpoint shows."""
    for rank in found(f"small-{dtype}-{stage}"):
        assert rank["masters"] == [pytest.approx(0.99, abs=1e-6)]
        assert rank["weight"] == (0.98828125 if dtype == "bfloat16" else rank["masters"][0])


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
def test_case_77_tiny_updates_add_up(found, dtype):
    """Ten thousand of 1e-6: 0.99 up to fp32's own rounding of each, 17 spacings of 6e-8 for 16.8."""
    for rank in found(f"tiny-{dtype}-2"):
        assert rank["masters"] == [pytest.approx(0.99, abs=2e-4)]
        assert rank["weight"] == (0.98828125 if dtype == "bfloat16" else rank["masters"][0])
