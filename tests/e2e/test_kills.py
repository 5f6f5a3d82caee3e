"""Kill -9 at random moments, a full disk and a read-only one: nothing good is lost, and the run ends as ever."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from launching import ROOT, make_rows, needs_cpu_engine, run, write_config, write_jsonl
from safetensors.torch import load_file

from spmd_rl import run_folder

pytestmark = needs_cpu_engine
SEED = 7
# Kills, and steps of the run that they interrupt.
TIERS = [(3, 12), pytest.param((20, 80), marks=pytest.mark.long)]
LEFT_OUT = ("timing/", "perf/", "memory/")
CHECKPOINT_MB = 5  # of the tiny model: 435,000 parameters with masters and moments


def rows_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(LEFT_OUT)} for line in lines]


@pytest.fixture(scope="module", params=TIERS, ids=lambda tier: f"{tier[0]} kills in {tier[1]} steps")
def tier(request, model, tmp_path_factory):
    """(kills, config): one rank, a checkpoint each step; the run of it that nothing interrupts is in `straight`."""
    num_kills, num_steps = request.param
    folder = tmp_path_factory.mktemp("kills")
    train = write_jsonl(folder / "train.jsonl", make_rows(10, seed=3))
    path = write_config(folder / "config.yaml", model, train, folder / "straight", run={"max_steps": num_steps},
                        policy={"optimizer": "adamw", "learning_rate": 3e-4}, checkpoint={"save_steps": 1})
    run(["-m", "spmd_rl.train", "--config", str(path)]).succeeded()
    return num_kills, path


def same_as_straight(config, folder):
    straight = config.parent / "straight"
    found, wanted = (load_file(f / "export" / "model.safetensors") for f in (folder, straight))
    return rows_of(folder) == rows_of(straight) and all(found[name].equal(wanted[name]) for name in wanted)


def start(config, folder, log, background):
    return subprocess.Popen([sys.executable, "-m", "spmd_rl.train", "--config", str(config), "--run.output_dir",
                             str(folder), "--checkpoint.background", background],
                            stdout=log, stderr=subprocess.STDOUT, cwd=ROOT,
                            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})


def test_case_58_kills_at_random_moments(tier, tmp_path):
    """After each kill at a random moment of steps and saves, in the step or beside it by turns, the next start goes on;
    the last one ends with the metrics and weights of the straight run."""
    draw, folder = random.Random(SEED), tmp_path / "run"
    num_kills, config = tier
    for kill in range(num_kills):
        log_path = tmp_path / f"{kill}.log"
        with open(log_path, "w") as log:
            process = start(config, folder, log, "true" if kill % 2 else "false")
            deadline = time.monotonic() + 120
            while "grad" not in log_path.read_text() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            assert process.poll() is None, log_path.read_text()
            time.sleep(draw.random() * 0.3)
            process.send_signal(signal.SIGKILL)
            process.wait(30)
        newest = run_folder.checkpoints(str(folder))
        assert not newest or run_folder.fault(newest[0]) is None
    run(["-m", "spmd_rl.train", "--config", str(config), "--run.output_dir", str(folder)]).succeeded()
    assert same_as_straight(config, folder)


@pytest.fixture
def config(tier):
    """Of the whole-program runs on a disk of their own."""
    return tier[1]


@pytest.fixture
def small_disk(tmp_path):
    """A function that mounts a tmpfs of some MB at a path; it is unmounted afterwards."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    mounted = []

    def mount(path, megabytes):
        path.mkdir(parents=True)
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(path)],
                              capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no mount here: {done.stderr.strip()}")
        mounted.append(path)

    yield mount
    for path in mounted:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.mark.long
def test_a_full_disk_keeps_what_is_good(config, tmp_path, small_disk):
    """Room for two checkpoints and a half: the third save fails, with the disk named and two whole checkpoints left;
    with more room the run goes on to the end of the straight one."""
    folder = tmp_path / "run"
    small_disk(folder / "checkpoints", CHECKPOINT_MB * 5 // 2)
    arguments = ["-m", "spmd_rl.train", "--config", str(config), "--run.output_dir", str(folder)]
    finished = run(arguments)
    assert finished.returncode == 1 and "failed in phase save" in finished.output, finished.output
    assert "space" in finished.output or "writ" in finished.output
    kept = run_folder.checkpoints(str(folder))
    assert [run_folder.fault(path) for path in kept] == [None, None]
    subprocess.run(["mount", "-o", f"remount,size={CHECKPOINT_MB * 6}m", str(folder / "checkpoints")], check=True)
    run(arguments).succeeded()
    assert same_as_straight(config, folder)


@pytest.mark.long
def test_a_read_only_disk_keeps_what_is_good(config, tmp_path, small_disk):
    """Checkpoints on a disk that has become read-only: the run says so and ends; what was there is whole."""
    folder = tmp_path / "run"
    small_disk(folder / "checkpoints", CHECKPOINT_MB * 6)
    arguments = ["-m", "spmd_rl.train", "--config", str(config), "--run.output_dir", str(folder)]
    run([*arguments, "--run.max_steps", "2"]).succeeded()
    subprocess.run(["mount", "-o", "remount,ro", str(folder / "checkpoints")], check=True)
    finished = run(arguments)
    assert finished.returncode == 1 and "Read-only file system" in finished.output, finished.output
    assert [run_folder.fault(path) for path in run_folder.checkpoints(str(folder))] == [None, None]
