"""tools/bench_scaling.py on CPU ranks: the program under torchrun with other numbers of them, and a table."""

import json

import pytest
from launching import ROOT, needs_cpu_engine, run

pytestmark = [needs_cpu_engine, pytest.mark.long]


def test_every_column_that_needs_no_gpu_has_a_number(model, prompts, tmp_path):
    """One and two ranks with the same work a rank, at ZeRO 3, in turns."""
    out = tmp_path / "scaling.json"
    run([str(ROOT / "tools" / "bench_scaling.py"), "--model", str(model), "--train", str(prompts / "train.jsonl"),
         "--ranks", "1,2", "--stage", "3", "--device", "cpu", "--dtype", "float32", "--steps", "3", "--warm_up", "1",
         "--prompts", "2", "--num_generations", "4", "--max_prompt_length", "24", "--max_completion_length", "6",
         "--out", str(out)]).succeeded()
    one, two = json.loads(out.read_text())["runs"]
    for result in (one, two):
        assert all(result[name] > 0 for name in ("step", "rollout", "learn", "sync", "tokens/s a rank", "efficiency"))
        assert result["steps"] == 4 == len(result["of a step"]["timing/rollout"])  # two of each of two runs
    assert one["efficiency"] == 1 and two["ranks"] == 2 and two["load"] >= 1 and two["lag"] >= 0
