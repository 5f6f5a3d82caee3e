"""The whole program on one GPU: real vLLM and DeepSpeed, bf16, the engine asleep while the policy trains."""

import gzip
import json
import pickle

import launching
import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.gpu

ONE_DEVICE = launching.ROOT / "tests" / "gpu" / "one_device.py"
STEPS = 3
REWARDS = {"functions": ["regex"], "regex_pattern": "[0-4]"}  # some completions of a hardly trained model have it
# Mean |sampler - policy| log-prob in bf16: both round every activation, in kernels of their own.
SAMPLER_GAP = 0.03


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    model = launching.make_model(folder / "model", tied=True)
    return model, launching.write_jsonl(folder / "train.jsonl", launching.make_rows(64, seed=1))


def run_program(inputs, tmp_path, **sections):
    model, train = inputs
    sections = {"run": {"output_dir": str(tmp_path / "run"), "max_steps": STEPS}, "mesh": {"device": "cuda"}} | sections
    rollout = {"num_generations": 4, "max_completion_length": 6, "enforce_eager": True, "gpu_memory_utilization": 0.3}
    rollout |= sections.pop("rollout", {})
    config = launching.write_config(tmp_path / "config.yaml", model, train, tmp_path / "run", rollout=rollout,
                                    rewards=REWARDS, **sections)
    launching.run(["-m", "spmd_rl.train", "--config", str(config), "--model.dtype", "bfloat16"],
                  timeout_s=240).succeeded()
    with open(tmp_path / "run" / "metrics.jsonl") as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("stage, transport", [(2, "auto"), (2, "ipc"), (3, "auto")])
def test_first_step_and_sleep(stage, transport, inputs, tmp_path):
    """Unchanged weights give ratio 1 and KL 0; the engine's memory is not there while the policy trains."""
    rows = run_program(inputs, tmp_path, loss={"beta": 0.1, "recompute_old_logprobs": True},
                       policy={"zero_stage": stage, "learning_rate": 0.1}, memory={"swap": "always"},
                       weight_sync={"transport": transport})
    assert len(rows) == STEPS
    assert abs(rows[0]["ratio"] - 1) <= 1e-3
    assert abs(rows[0]["kl"]) <= 1e-3
    assert rows[1]["kl"] > rows[0]["kl"]
    for row in rows:
        assert row["sampling/sampling_logp_difference/mean"] <= SAMPLER_GAP
        # 0.3 of the device while sampling; the tiny policy alone while training.
        assert row["memory/rollout_gib"] - row["memory/train_gib"] > 0.2 * row["memory/rollout_gib"]


def test_a_profiled_step_leaves_a_trace_and_a_snapshot(inputs, tmp_path):
    """Of the step asked for alone: phases and kernels in the trace; in torch's allocator snapshot the memory that is
    held and who asked for it. What the machine did is among the metrics."""
    rows = run_program(inputs, tmp_path, run={"output_dir": str(tmp_path / "run"), "max_steps": STEPS,
                                              "profile_steps": "2"})
    found = sorted(path.name for path in (tmp_path / "run" / "profile").iterdir())
    assert found == ["step-2-rank-0.json.gz", "step-2-rank-0.pickle"]
    trace = json.loads(gzip.decompress((tmp_path / "run" / "profile" / found[0]).read_bytes()))["traceEvents"]
    phases = {event["name"] for event in trace if event.get("cat") == "user_annotation"}
    assert {"step", "rollout", "learn", "train", "optimizer", "sync"} <= phases
    assert sum(event.get("cat") == "kernel" for event in trace) > 100
    snapshot = pickle.loads((tmp_path / "run" / "profile" / found[1]).read_bytes())
    assert sum(segment["total_size"] for segment in snapshot["segments"]) > 0
    events = [event for device in snapshot["device_traces"] for event in device]
    assert {"alloc", "free_completed"} <= {event["action"] for event in events}
    assert any(frame["filename"].endswith("policy.py") for event in events for frame in event.get("frames", ()))
    assert 0 <= rows[0]["perf/gpu_utilization"] <= 1  # there is a reading a second; a tiny model's step may have none
    for row in rows:
        assert {"memory/rollout_gib", "memory/train_gib", "memory/host_used_gib", "memory/process_gib"} <= row.keys()


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_two_ranks_on_one_device(tensor_parallel_size, inputs, tmp_path):
    """Real NCCL under ZeRO-3 with two ranks: NCCL takes them for two hosts, and each sees device 0."""
    model, train = inputs
    rollout = {"num_generations": 4, "max_completion_length": 6, "enforce_eager": True, "gpu_memory_utilization": 0.1,
               "tensor_parallel_size": tensor_parallel_size}
    config = launching.write_config(
        tmp_path / "config.yaml", model, train, tmp_path / "run", rollout=rollout,
        run={"output_dir": str(tmp_path / "run"), "max_steps": STEPS}, mesh={"device": "cuda"},
        policy={"zero_stage": 3, "learning_rate": 0.1}, rewards=REWARDS,
        vllm={"kv_cache_memory_bytes": 2**30, "disable_custom_all_reduce": True})
    arguments = [str(ONE_DEVICE), "--config", str(config), "--model.dtype", "bfloat16"]
    for finished in launching.without_launcher(2, arguments, timeout_s=240):
        finished.succeeded()
    with open(tmp_path / "run" / "metrics.jsonl") as file:
        rows = [json.loads(line) for line in file]
    assert len(rows) == STEPS
    assert all(row["sampling/sampling_logp_difference/mean"] <= SAMPLER_GAP for row in rows)


@pytest.mark.parametrize("stage", [2, 3])
def test_two_runs_are_equal_with_deterministic_kernels(stage, inputs, tmp_path):
    """mesh.full_determinism: every metric of every step, but seconds, speed and memory, to the last bit."""
    found = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        rows = run_program(inputs, tmp_path / name, mesh={"device": "cuda", "full_determinism": True},
                           policy={"zero_stage": stage, "learning_rate": 0.1}, loss={"num_iterations": 2})
        found.append(compared(rows))
    assert found[0] == found[1] and found[0][0]["grad_norm"] > 0


def compared(rows):
    """What two runs should have alike."""
    return [{key: value for key, value in row.items() if not key.startswith(("timing/", "perf/", "memory/"))}
            for row in rows]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_resumed_run_is_the_uninterrupted_one(stage, inputs, tmp_path):
    """Steps 3 and 4 after a resume, saved beside the steps while masters and moments take turns with the engine: with
    deterministic kernels the metrics and the exported weights of four steps at once, to the last bit."""
    sections = {"mesh": {"device": "cuda", "full_determinism": True}, "memory": {"swap": "always"},
                "policy": {"zero_stage": stage, "optimizer": "adamw", "learning_rate": 1e-3},
                "checkpoint": {"save_steps": 1, "background": True}}
    found = {}
    for name, parts in (("straight", [4]), ("resumed", [2, 4])):
        (tmp_path / name).mkdir()
        for max_steps in parts:
            found[name] = run_program(inputs, tmp_path / name, run={"max_steps": max_steps}, **sections)
    assert len(found["straight"]) == 4 and compared(found["resumed"]) == compared(found["straight"])
    weights, wanted = (load_file(tmp_path / name / "run" / "export" / "model.safetensors") for name in
                       ("resumed", "straight"))
    assert weights.keys() == wanted.keys() and all(weights[key].equal(wanted[key]) for key in wanted)
