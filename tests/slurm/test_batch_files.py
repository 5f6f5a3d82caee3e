"""The batch files of launch/slurm on two nodes of one rank each, with the whole program on CPU ranks."""

import json
import os
import signal
import time

import psutil
import pytest
from launching import ROOT, make_rows, needs_cpu_engine, torchrun, write_config, write_jsonl
from safetensors.torch import load_file

from spmd_rl import run_folder

pytestmark = needs_cpu_engine
REWARD = str(ROOT / "tests" / "e2e" / "interrupting.py") + ":reward"
NUM_STEPS = 8
LEFT_OUT = ("timing/", "perf/", "memory/")
SLOW = {"REWARD_SECONDS": "1"}  # a step of over a second: something can be done to a run meanwhile
TIMEOUT_S = 300


def rows_of(folder):
    """Whole lines of metrics.jsonl without what differs between any two runs; none before there are any."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [{name: value for name, value in json.loads(line).items() if not name.startswith(LEFT_OUT)}
            for line in lines if line.endswith("\n")]


class Program:
    """A config, the run that nothing interrupts, and jobs of the same config."""

    def __init__(self, base, model):
        self.base = base
        train = write_jsonl(base / "train.jsonl", make_rows(10, seed=3))
        self.config = write_config(base / "config.yaml", model, train, base / "straight", run={"max_steps": NUM_STEPS},
                                   rewards={"functions": [REWARD], "num_workers": 0}, checkpoint={"save_steps": 3},
                                   policy={"optimizer": "adamw", "learning_rate": 3e-3, "zero_stage": 2})
        torchrun(2, ["-m", "spmd_rl.train", "--config", str(self.config)], timeout_s=TIMEOUT_S).succeeded()
        self.wanted = rows_of(base / "straight")

    def submit(self, cluster, batch_file, name, *options, env=None, arguments=()):
        """(job, its run folder, its output file)."""
        log = self.base / f"{name}.out"
        job = cluster.submit(batch_file, "--config", str(self.config), "--run.output_dir", str(self.base / name),
                             *arguments, options=[f"--output={log}", *options], env=env)
        return job, self.base / name, log

    def same_as_straight(self, folder):
        found, wanted = (load_file(f / "export" / "model.safetensors") for f in (folder, self.base / "straight"))
        return rows_of(folder) == self.wanted and all(found[name].equal(wanted[name]) for name in wanted)


@pytest.fixture(scope="module")
def program(cluster, model, tmp_path_factory):
    """The config and its uninterrupted run."""
    return Program(tmp_path_factory.mktemp("slurm"), model)


def wait_for_steps(cluster, folder, steps, log):
    cluster.wait_for(lambda: len(rows_of(folder)) >= steps, TIMEOUT_S, f"step {steps}", log)


def test_a_notice_saves_requeues_and_goes_on(cluster, program):
    """The batch script is told that time is up: the ranks of both nodes save after their step, the job is put back by
    itself, starts again, and ends with the metrics and weights of the run that nothing interrupted."""
    job, folder, log = program.submit(cluster, "multi_node.sbatch", "notice", env=SLOW)
    wait_for_steps(cluster, folder, 1, log)
    cluster.call("scancel", "--batch", "--signal=USR1", str(job))
    fields = cluster.wait_for_end(job, TIMEOUT_S, log)
    assert (fields["JobState"], fields["Restarts"], fields["NumNodes"]) == ("COMPLETED", "1", "2"), cluster.logs(log)
    assert "SIGUSR1: ended after step" in log.read_text() and "goes on from" in log.read_text()
    assert program.same_as_straight(folder)


@pytest.mark.long
@pytest.mark.parametrize("batch_file", ["multi_node_torchrun.sbatch", "multi_node.sbatch"])
def test_a_time_limit_saves_requeues_and_goes_on(cluster, program, batch_file):
    """SLURM's own clock: a job of three minutes and a run that needs longer; the notice may come a minute early."""
    name = f"limit-{batch_file.partition('.')[0]}"
    job, folder, log = program.submit(cluster, batch_file, name, "--time=3", "--signal=B:USR1@60",
                                      env={"REWARD_SECONDS": "15"})
    fields = cluster.wait_for_end(job, 900, log)
    assert fields["JobState"] == "COMPLETED" and int(fields["Restarts"]) >= 1, cluster.logs(log)
    assert program.same_as_straight(folder)


@pytest.mark.long
@pytest.mark.parametrize("options, state, code", [((), "CANCELLED", None),
                                                  (("--batch", "--signal=TERM"), "FAILED", "75:0")])
def test_a_cancelled_job_saves_and_stays_away(cluster, program, options, state, code):
    """scancel: the ranks have the time until SLURM kills them to save, and the job is not put back. With SIGTERM to its
    script they have all the time, and the job ends with their code (to all of it, with --full, it would end srun)."""
    job, folder, log = program.submit(cluster, "multi_node.sbatch", f"ended-{state}", env=SLOW)
    wait_for_steps(cluster, folder, 1, log)
    cluster.call("scancel", *options, str(job))
    fields = cluster.wait_for_end(job, 90, log)
    assert (fields["JobState"], fields["Restarts"]) == (state, "0"), cluster.logs(log)
    assert code in (None, fields["ExitCode"])
    cluster.wait_for(lambda: cluster.job(job)["JobState"] == state and not ranks_of(folder), 60, "end", log)
    newest = run_folder.checkpoints(str(folder))[0]
    assert run_folder.fault(newest) is None and run_folder.read_state(newest)["step"] >= 1


def ranks_of(folder):
    """The processes of a run."""
    return [process for process in psutil.process_iter(["cmdline"])
            if str(folder) in (process.info["cmdline"] or []) and "spmd_rl.train" in process.info["cmdline"]
            and "srun" not in process.info["cmdline"][0]]


@pytest.mark.long
@pytest.mark.parametrize("batch_file", ["multi_node.sbatch", "multi_node_torchrun.sbatch"])
def test_a_killed_rank_ends_the_job_and_it_can_be_started_again(cluster, program, batch_file):
    """Kill -9 of one rank: the job fails within a minute, is not put back, and a second one goes on."""
    name = f"killed-{batch_file.partition('.')[0]}"
    job, folder, log = program.submit(cluster, batch_file, name, env=SLOW)
    wait_for_steps(cluster, folder, 4, log)
    ranks = [process for process in ranks_of(folder) if not any("launch/torchrun.py" in a for a in process.cmdline())]
    os.kill(ranks[-1].pid, signal.SIGKILL)
    start = time.monotonic()
    fields = cluster.wait_for_end(job, 90, log)
    assert fields["JobState"] == "FAILED" and fields["Restarts"] == "0"
    assert time.monotonic() - start < 60
    job, folder, log = program.submit(cluster, batch_file, name)
    assert cluster.wait_for_end(job, TIMEOUT_S, log)["JobState"] == "COMPLETED", cluster.logs(log)
    assert program.same_as_straight(folder)


@pytest.mark.long
def test_case_68_two_jobs_at_once_on_the_same_nodes(cluster, program):
    """Their ports do not clash: both run at the same time on both nodes, and both end well."""
    jobs = [program.submit(cluster, "multi_node.sbatch", f"twin-{n}", env=SLOW) for n in (1, 2)]
    cluster.wait_for(lambda: all(cluster.job(job)["JobState"] == "RUNNING" for job, _, _ in jobs), 60, "both running")
    for job, folder, log in jobs:
        assert cluster.wait_for_end(job, TIMEOUT_S, log)["JobState"] == "COMPLETED", cluster.logs(log)
        assert program.same_as_straight(folder)


@pytest.mark.long
def test_an_array_is_a_run_a_seed(cluster, program):
    """Seeds 0 and 1, each two ranks of one node, each in a folder of its own; seed 0 is the straight run."""
    job, _, log = program.submit(cluster, "seeds.sbatch", "array", "--array=0-1", "--ntasks-per-node=2",
                                 env={"RUNS": str(program.base / "seeds"), "RANKS_PER_NODE": "2"})
    cluster.wait_for(lambda: not cluster.call("squeue", "-h", "-j", str(job)).strip(), TIMEOUT_S, "the array's end",
                     log)
    assert program.same_as_straight(program.base / "seeds" / "0"), log.read_text()
    assert len(rows_of(program.base / "seeds" / "1")) == NUM_STEPS
    assert rows_of(program.base / "seeds" / "1") != program.wanted
