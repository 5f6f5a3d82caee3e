"""Two hosts on one machine: two network namespaces, joined by a pair of interfaces.

What one host serves the other reaches by its address alone, and a host can be lost by taking its interface down. Each
has an identity and a /dev/shm of its own.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest
from launching import ROOT, Once, make_rows, needs_cpu_engine, processes, torchrun, write_config, write_jsonl

from spmd_rl import run_folder, watchdog

DIST = ROOT / "tests" / "dist"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 21077  # of the namespaces' own, where nothing else listens
# Two mounts that other processes do not see: what tells hosts apart, and what only a host's own processes can open.
AS_HOST = """set -e
mount --bind "$HOST_FILES/boot_id" /proc/sys/kernel/random/boot_id
mount --bind "$HOST_FILES/shm" /dev/shm
exec "$@" """
CELL = {"name": "bfloat16-3", "stage": 3, "dtype": "bfloat16"}


class Hosts:
    """The two namespaces."""

    def __init__(self, folder):
        self.folder = folder
        self.names = [f"spmd_rl-{os.getpid()}-{number}" for number in range(2)]
        self.interfaces = [f"rl{os.getpid() % 10**6}{letter}" for letter in "ab"]

    def make(self):
        """Returns why that cannot be done, or None."""
        if os.geteuid() != 0 or not shutil.which("ip"):
            return "network namespaces need root and iproute2"
        for number, name in enumerate(self.names):
            (self.folder / name / "shm").mkdir(parents=True)
            (self.folder / name / "boot_id").write_text(f"host-{number}")
        done = [self.ip("netns", "add", name) for name in self.names]
        first, second = self.interfaces
        done.append(self.ip("link", "add", first, "type", "veth", "peer", "name", second))
        for name, interface, address in zip(self.names, self.interfaces, ADDRESSES):
            done.append(self.ip("link", "set", interface, "netns", name))
            done.append(self.ip("-n", name, "addr", "add", f"{address}/24", "dev", interface))
            done.extend(self.ip("-n", name, "link", "set", link, "up") for link in ("lo", interface))
        return next((error for error in done if error), None)

    @staticmethod
    def ip(*arguments):
        """Runs ip; what it says of a failure."""
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30, check=False)
        return done.stderr.strip() if done.returncode else None

    def lose(self, number):
        """From now on that host's packets arrive nowhere."""
        self.ip("-n", self.names[number], "link", "set", self.interfaces[number], "down")

    def find_again(self, number):
        """The reverse."""
        self.ip("-n", self.names[number], "link", "set", self.interfaces[number], "up")

    def remove(self):
        """The interfaces go with the namespaces."""
        for name in self.names:
            self.ip("netns", "del", name)

    def run(self, arguments, envs, timeout_s):
        """A process each, with its variables; as many on each host, host by host."""
        hosts = [number for number in (0, 1) for _ in range(len(envs) // 2)]
        commands = [["ip", "netns", "exec", self.names[host], "sh", "-c", AS_HOST, "sh", sys.executable, *arguments]
                    for host in hosts]
        return processes(commands, [env | {"GLOO_SOCKET_IFNAME": self.interfaces[host],
                                           "HOST_FILES": str(self.folder / self.names[host])}
                                    for env, host in zip(envs, hosts)], timeout_s)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """The two hosts; skips where they cannot be had."""
    made = Hosts(tmp_path_factory.mktemp("hosts"))
    try:
        reason = made.make()
        if reason:
            pytest.skip(reason)
        yield made
    finally:
        made.remove()


def launched(rank, master, a_host=1):
    """A launcher's variables of a rank, with `a_host` ranks on each; they meet at host `master`."""
    return {"RANK": str(rank), "WORLD_SIZE": str(2 * a_host), "LOCAL_RANK": str(rank % a_host),
            "LOCAL_WORLD_SIZE": str(a_host), "MASTER_ADDR": ADDRESSES[master], "MASTER_PORT": str(PORT)}


def task(rank, node):
    """SLURM's variables of a task; they meet on node 0."""
    return {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": "0", "SLURM_NODEID": str(node), "SLURM_STEP_NODELIST": f"{ADDRESSES[0]},{ADDRESSES[1]}",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}


LAYOUTS = {
    "rank 0 at the master": [launched(0, master=0), launched(1, master=0)],
    "rank 0 on the other host": [task(1, node=0), task(0, node=1)],
}


@pytest.fixture(scope="module")
def checkpoints(hosts, models, tmp_path_factory):
    """layout -> (what the ranks found, run folder): five steps, saves, and two resumes."""
    def make(layout):
        folder = tmp_path_factory.mktemp("hosts")
        job = {"model": str(models["tied"]), "folder": str(folder), "cells": [CELL]}
        (folder / "job.json").write_text(json.dumps(job))
        for finished in hosts.run([str(DIST / "worker_checkpoint.py"), str(folder / "job.json")], LAYOUTS[layout], 200):
            finished.succeeded()
        return json.loads((folder / f"{CELL['name']}.json").read_text()), folder / CELL["name"]

    return Once(make)


@pytest.mark.parametrize("layout", [pytest.param("rank 0 at the master", marks=pytest.mark.long),
                                    "rank 0 on the other host"])
def test_a_checkpoint_of_two_hosts_is_whole(checkpoints, layout):
    """Each host writes its shards, one renames the folder when both are on disk; resumed twice, the run is the one that
    was never interrupted. Rank 0 need not be where the ranks meet."""
    ranks, folder = checkpoints(layout)
    assert len(ranks) == 2
    for found in ranks:
        assert found["resumed"] + found["resumed again"] == found["straight"][2:]
        assert found["loaded"] == {name: found["straight"][1][name] for name in ("weights", "optimizer")}
    paths = run_folder.checkpoints(str(folder))
    assert len(paths) == 2 and all(run_folder.fault(path) is None for path in paths)


@pytest.mark.long
def test_the_hosts_do_not_change_the_numbers(checkpoints):
    """Both layouts have the same losses and weights, step by step."""
    first, second = (checkpoints(layout)[0][0]["straight"] for layout in LAYOUTS)
    for one, other in zip(first, second, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert one["learning_rate"] == other["learning_rate"]


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
@needs_cpu_engine
def test_shards_cross_the_network_once_a_host(hosts, models, tmp_path):
    """ZeRO-3 with two ranks on each host: `auto` takes handles within a host and gathers between them, also where each
    host shards the weights again, and the steps are those of four ranks of one host that gather everything."""
    train = write_jsonl(tmp_path / "train.jsonl", make_rows(64, seed=1))

    def config_of(name, transport, **zero):
        return str(write_config(tmp_path / f"{name}.yaml", models["tied"], train, tmp_path / name,
                                policy={"zero_stage": 3, "optimizer": "adamw", "learning_rate": 0.01},
                                weight_sync={"transport": transport}, memory={"swap": "always"},
                                deepspeed={"zero_optimization": zero} if zero else {}))

    envs = [launched(rank, master=0, a_host=2) for rank in range(4)]
    several = hosts.run(["-m", "spmd_rl.train", "--config", config_of(
        "several", "auto", zero_hpz_partition_size=2, stage3_param_persistence_threshold=100)], envs, 300)
    for finished in several:
        finished.succeeded()
    assert "weight sync: ipc (between hosts by gathers)" in several[0].output
    torchrun(4, ["-m", "spmd_rl.train", "--config", config_of("one", "gather")], timeout_s=300).succeeded()
    keys = ("loss", "grad_norm", "reward", "entropy", "sampling/sampling_logp_difference/mean")
    for found, right in zip(rows_of(tmp_path / "several"), rows_of(tmp_path / "one"), strict=True):
        assert [found[key] for key in keys] == pytest.approx([right[key] for key in keys], rel=1e-5, abs=1e-6)
        assert found["sampling/sampling_logp_difference/mean"] < 1e-4


@pytest.mark.long
def test_a_lost_host_ends_the_other(hosts):
    """No packet comes any more, no connection is closed, and both ranks are busy by themselves: within a minute each
    ends with 1, and says whom it misses: rank 0 the other rank, rank 1 the host where they meet."""
    lost = []

    def lose():
        time.sleep(20)  # both are busy by then; a rank that is late would only be lost earlier
        lost.append(time.time())
        hosts.lose(1)

    thread = threading.Thread(target=lose)
    thread.start()
    try:
        finished = hosts.run([str(DIST / "worker_watchdog.py"), "lost", "reward", "1800"],
                             LAYOUTS["rank 0 at the master"], 110)
    finally:
        thread.join()
        hosts.find_again(1)
    for process in finished:
        assert process.returncode == 1 and "busy" in process.output, process.output
        assert process.ended - lost[0] < watchdog.VANISHED_S + 15
    assert "rank 1 has vanished: no sign of life for 4" in finished[0].output
    assert f"from {ADDRESSES[0]}, where the ranks meet: that host is gone" in finished[1].output
