"""In bf16 the gradient of many rows is the sum of their gradients."""

import json
from pathlib import Path

import launching
import pytest


@pytest.fixture(scope="module")
def norms(models, tmp_path_factory):
    out = tmp_path_factory.mktemp("accumulation") / "norms.json"
    worker = Path(__file__).with_name("worker_accumulation.py")
    launching.run([str(worker), str(models["tied"]), str(out)], timeout_s=240).succeeded()
    return json.loads(out.read_text())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_gradients_of_many_rows_add_up(stage, norms):
    """256 equal rows, each 1/256 of the loss: the norm is fp32's to 1 %. Summed in bf16 it stops growing at a third
    to three quarters of it, where a row's part falls below half a spacing of the sum."""
    assert norms[f"bfloat16-{stage}"] == pytest.approx(norms["float32-2"], rel=0.01)
