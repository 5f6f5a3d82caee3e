"""A fault on one rank ends all ranks within seconds, with that rank's traceback and phase.

Under torchrun, which ends the peers itself, and as plain processes, where only the abort key in the store can.
"""

import re

import pytest
from launching import ROOT, needs_cpu_engine, torchrun, without_launcher, write_config

from spmd_rl import run_folder

pytestmark = needs_cpu_engine
FAILING = str(ROOT / "tests" / "e2e" / "failing.py")
MAX_SECONDS = 30
# Where the fault is -> the phase that the message names.
PHASE = {"generation": "rollout", "reward": "reward", "backward": "train", "sync": "sync"}
CORE = [("generation", 0, "processes"), ("backward", 1, "processes"), ("sync", 0, "torchrun")]
WHOLE = [(where, rank, how) for where in PHASE for rank in (0, 1) for how in ("torchrun", "processes")]
ROWS = CORE + [pytest.param(*row, marks=pytest.mark.long) for row in WHOLE if row not in CORE]


@pytest.fixture(scope="module")
def config(model, prompts, tmp_path_factory):
    """Sharded weights, small buckets: peers of a rank that leaves a gather or a backward wait inside it. The time-out
    is far above what a test allows."""
    folder = tmp_path_factory.mktemp("failure")
    return write_config(
        folder / "config.yaml", model, prompts / "train.jsonl", folder / "run", mesh={"timeout_s": 1800},
        policy={"zero_stage": 3}, weight_sync={"bucket_mib": 1}, rewards={"functions": [f"{FAILING}:reward"]},
        batch={"max_tokens_per_microbatch": 16})


def assert_all_ended(finished, where, rank):
    """Exit codes are not 0, the output has the failing rank, its phase and its traceback, and the last process ended
    within 30 s of the fault."""
    output = "\n".join(process.output for process in finished)
    assert all(process.returncode != 0 for process in finished), output[-4000:]
    injected = re.findall(r"injected at ([\d.]+)", output)
    assert len(injected) == 1 or (injected and where == "reward"), output[-4000:]  # there once a completion
    assert max(process.ended for process in finished) - min(map(float, injected)) < MAX_SECONDS
    assert f"[rank {rank}] failed in phase {PHASE[where]}:\nTraceback (most recent call last)" in output, output[-4000:]
    assert f"InjectedFault: a fault in {where}" in output
    assert ", in fail\n    raise InjectedFault(" in output


@pytest.mark.long
def test_failed_run_does_not_stop_the_next(config):
    """Two runs of one engine of two ranks fail one after the other, each at its own fault, a reward's: the first leaves
    nothing (shared memory of the engine, build locks) that the second falls over."""
    for _ in range(2):
        finished = torchrun(2, [FAILING, "reward", "1", "--config", str(config), "--rollout.tensor_parallel_size", "2"],
                            env={"FAILING_RANK": "1"})
        assert_all_ended([finished], "reward", 1)


@pytest.mark.parametrize("where, rank, how", ROWS)
def test_fault_on_one_rank_ends_all(config, where, rank, how):
    """Wherever it is, also where only the abort key can end the others."""
    arguments = [FAILING, where, str(rank), "--config", str(config)]
    env = {"FAILING_RANK": str(rank) if where == "reward" else "none"}
    if how == "torchrun":
        finished = [torchrun(2, arguments, env=env)]
    else:
        finished = without_launcher(2, arguments, env=env)
    assert_all_ended(finished, where, rank)
    if how == "processes":
        # A peer inside a collective may find its connection closed before it looks at the store.
        peer = finished[1 - rank].output
        assert re.search(rf"\[rank {1 - rank}\] leaves: |onnection (closed|reset) by peer", peer), peer[-4000:]


@pytest.mark.parametrize("background", ["false", pytest.param("true", marks=pytest.mark.long)])
def test_a_fault_in_a_save_leaves_the_last_checkpoint(config, tmp_path, background):
    """One rank fails in the second save, beside the steps or not: all end, the first checkpoint is whole, and the same
    command goes on from it to the end."""
    options = ["--config", str(config), "--run.output_dir", str(tmp_path), "--checkpoint.save_steps", "1",
               "--checkpoint.background", background]
    env = {"FAILING_RANK": "none"}
    finished = without_launcher(2, [FAILING, "save", "1", *options], env=env)
    output = "\n".join(process.output for process in finished)
    assert [process.returncode for process in finished] == [1, 1], output[-4000:]
    injected = re.findall(r"injected at ([\d.]+)", output)
    assert max(process.ended for process in finished) - float(injected[0]) < MAX_SECONDS
    assert "[rank 1] failed in phase save:\nTraceback (most recent call last)" in output
    newest = run_folder.checkpoints(str(tmp_path))[0]
    assert newest.endswith("step-1") and run_folder.fault(newest) is None
    resumed = torchrun(2, [FAILING, "none", "1", *options], env=env).succeeded()
    assert f"goes on from {newest}" in resumed.output
