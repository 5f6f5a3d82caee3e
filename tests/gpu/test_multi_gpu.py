"""Several ranks with real NCCL: weights, states, whole steps, and a rank that is killed.

Each on a GPU of its own; steps and a killed rank also all on one, whose collectives then go over sockets.
"""

import json
import os
import signal
import subprocess
import sys
import time

import launching
import psutil
import pytest

TOOL = str(launching.ROOT / "tools" / "check_weight_sync.py")
ONE_DEVICE = str(launching.ROOT / "tests" / "gpu" / "one_device.py")
VOCABULARY = 4224
STEPS = 3


def ranks(count):
    return pytest.param(count, marks=pytest.mark.multi_gpu(count))


def places(count, gpus):
    """So many ranks on so many GPUs: as many, or one."""
    return pytest.param((count, gpus), marks=pytest.mark.gpu if gpus == 1 else pytest.mark.multi_gpu(gpus))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    tool = launching.load_tool("make_model")
    for tied in (True, False):
        sizes = tool.TINY | dict(tied=tied, vocab_size=VOCABULARY)
        tool.save(folder / str(tied), tool.build_model("qwen3", **sizes), tool.make_tokenizer(VOCABULARY))
    return folder, launching.write_jsonl(folder / "train.jsonl", launching.make_rows(64, seed=1))


def environment():
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(launching.ROOT), os.environ.get("PYTHONPATH")]))}


@pytest.mark.parametrize("tensor_parallel_size", [1, 2, 4])
@pytest.mark.parametrize("count", [ranks(2), ranks(4)])
def test_every_tensor_has_the_policys_bits(inputs, tmp_path, count, tensor_parallel_size):
    """Each transport at ZeRO 1, 2 and 3, over noise and after optimizer steps, with weights that stay and that move."""
    if tensor_parallel_size > count:
        pytest.skip(f"an engine of {tensor_parallel_size} needs as many ranks")
    transports = "shared,ipc,gather" if tensor_parallel_size == 1 else "ipc,gather"
    for options in ([], ["--moving"]):
        out = tmp_path / f"{len(options)}.json"
        launching.torchrun(count, [
            TOOL, "--model", str(inputs[0] / "False"), "--device", "cuda", "--stages", "1,2,3", "--transports",
            transports, "--tensor_parallel_size", str(tensor_parallel_size), "--out", str(out), *options],
            env=environment()).succeeded()
        cells = json.loads(out.read_text())
        assert {cell["stage"] for cell in cells} == {1, 2, 3} and all(cell["right"] for cell in cells), cells


def config_of(inputs, folder, **sections):
    folder.mkdir(exist_ok=True)
    rollout = {"num_generations": 4, "max_completion_length": 6, "enforce_eager": True, "kv_cache_gib": 1.0}
    return launching.write_config(
        folder / "config.yaml", inputs[0] / "True", inputs[1], folder / "run",
        **{"mesh": {"device": "cuda"}, "run": {"output_dir": str(folder / "run"), "max_steps": STEPS}}
        | sections | {"rollout": rollout | sections.get("rollout", {})})


def program(place):
    """Arguments and environment of a job of (ranks, GPUs)."""
    count, gpus = place
    return [ONE_DEVICE] if gpus < count else ["-m", "spmd_rl.train"], environment() | launching.gpus(gpus)


def rows_of(folder):
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def steps(inputs, tmp_path_factory):
    """Metrics of a run's steps in fp32 with SGD: ((ranks, GPUs), ZeRO stage, memory.swap, ranks an engine, ranks that
    share out second shards) -> rows; one launch each."""
    def launch(place, stage, swap, tensor_parallel_size=1, group=1):
        folder = tmp_path_factory.mktemp("steps")
        own_reduce = {"disable_custom_all_reduce": True} if tensor_parallel_size > place[1] else {}
        config = config_of(
            inputs, folder, memory={"swap": swap}, rollout={"tensor_parallel_size": tensor_parallel_size},
            policy={"zero_stage": stage, "optimizer": "sgd", "learning_rate": 0.1}, vllm=own_reduce,
            deepspeed={"zero_optimization": {
                "zero_hpz_partition_size": group, "stage3_param_persistence_threshold": 100}} if group > 1 else {})
        command, env = program(place)
        launching.torchrun(place[0], [*command, "--config", str(config)], env=env).succeeded()
        rows = rows_of(folder)
        assert len(rows) == STEPS
        return rows

    return launching.Once(launch)


def same_first_step(several, one):
    for key in ("loss", "grad_norm", "reward", "entropy"):
        assert several[0][key] == pytest.approx(one[0][key], rel=1e-5, abs=1e-5), key
    assert all(row["sampling/sampling_logp_difference/mean"] < 1e-3 for row in several)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("place", [places(2, 2), places(4, 4), places(2, 1), places(4, 1)], ids=str)
def test_a_step_is_the_same_on_several_ranks(steps, place, stage):
    """fp32, SGD: losses and gradient norms of the first step are those of one rank to 1e-5; states that take turns or
    stay give the same metrics."""
    for swap in ("always", "auto") if place[1] > 1 else ("always",):
        same_first_step(steps(place, stage, swap), steps((1, 1), stage, "always"))


@pytest.mark.parametrize("tensor_parallel_size, group", [(4, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("place", [places(4, 4), places(4, 1)], ids=str)
def test_a_step_is_the_same_with_larger_engines_and_second_shards(steps, place, tensor_parallel_size, group):
    """ZeRO 3 with an engine of all four ranks, and with ZeRO++'s second shards in pairs (hpZ)."""
    same_first_step(steps(place, 3, "always", tensor_parallel_size, group), steps((1, 1), 3, "always"))


@pytest.mark.multi_gpu(2)
def test_case_55_one_process_a_gpu(inputs, tmp_path):
    """While two ranks run, each GPU has one process, and no process is on two: a stray context on the first GPU takes
    its memory from every rank's share."""
    config = config_of(inputs, tmp_path / "run", policy={"zero_stage": 3, "learning_rate": 0.1},
                       run={"output_dir": str(tmp_path / "run" / "run"), "max_steps": 60})
    with started((2, 2), config) as job:
        wait_for_steps(tmp_path / "run", 2, job)
        listed = subprocess.run(["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"],
                                capture_output=True, text=True, timeout=60, check=True).stdout.split("\n")
        family = {str(process.pid) for process in psutil.Process(job.pid).children(recursive=True)}
    pairs = [tuple(part.strip() for part in line.split(",")) for line in listed if line.strip()]
    pairs = [pair for pair in pairs if pair[0] in family]  # others' processes may share the host
    if not pairs:
        pytest.skip("nvidia-smi shows no processes here: another process namespace")
    assert len(pairs) == len({pid for pid, _ in pairs}) == len({gpu for _, gpu in pairs}) == 2, pairs


@pytest.mark.parametrize("place", [places(2, 2), places(2, 1)], ids=str)
def test_a_killed_rank_ends_the_others(inputs, tmp_path, place):
    """Within a minute, with a failure, and no process is left."""
    config = config_of(inputs, tmp_path / "run", policy={"zero_stage": 3, "learning_rate": 0.1},
                       run={"output_dir": str(tmp_path / "run" / "run"), "max_steps": 1000})
    with started(place, config) as job:
        wait_for_steps(tmp_path / "run", 1, job)
        family = psutil.Process(job.pid).children(recursive=True)
        victim = next(p for p in family if p.environ().get("RANK") == "1" and str(config) in p.cmdline())
        victim.send_signal(signal.SIGKILL)
        start = time.monotonic()
        assert job.wait(60) != 0
        assert time.monotonic() - start < 60
        _, alive = psutil.wait_procs(family, 10)
        assert not alive


class started:
    """A job under torchrun for the time of a block."""

    def __init__(self, place, config):
        command, env = program(place)
        self.command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
                        str(place[0]), *command, "--config", str(config)]
        self.env = os.environ | env

    def __enter__(self):
        self.job = subprocess.Popen(self.command, env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return self.job

    def __exit__(self, *error):
        if self.job.poll() is None:
            for process in [*psutil.Process(self.job.pid).children(recursive=True), self.job]:
                process.kill()
            self.job.wait(30)


def wait_for_steps(folder, count, job):
    """Until the run has written so many steps."""
    path, end = folder / "run" / "metrics.jsonl", time.monotonic() + 240
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert job.poll() is None, "the job ended by itself"
        assert time.monotonic() < end, "no step in 240 s"
        time.sleep(0.5)
