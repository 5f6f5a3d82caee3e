"""A SLURM of two nodes on this machine, with its own munge, started for the tests and stopped after them."""

import getpass
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import launching  # noqa: E402

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "runuser")
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
START_S = 60
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
AuthType=auth/munge
# cred_expire is also how long a job that was put back waits: by default two minutes.
AuthInfo=socket={folder}/munge/socket,cred_expire=15
CryptoType=crypto/munge
SlurmUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
# Ranks meet at a port of their job's number: two clusters of one machine that count from 1 would take the same.
FirstJobId={first_job}
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
KillWait=20
OverTimeLimit=0
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first_port}-{last_port}] CPUs=4
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def missing_reason():
    """Why no SLURM can be started here, or None; installs Debian's packages where that is possible."""
    if os.geteuid() != 0:
        return "starting slurmd needs root"
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    if any(not shutil.which(name, path=path) for name in NEEDED) and shutil.which("apt-get"):
        env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for command in (["apt-get", "update", "-qq"],
                        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES]):
            subprocess.run(command, env=env, timeout=300, check=False, capture_output=True)
    missing = [name for name in NEEDED if not shutil.which(name, path=path)]
    if not missing:
        return None
    return f"no {', '.join(missing)} (Debian: {' '.join(PACKAGES)}), and they could not be installed"


class Cluster:
    """Two nodes, n1 and n2, of four CPUs each."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="spmd_rl-slurm-"))
        self.folder.chmod(0o755)
        self._processes = []
        self.env = {name: value for name, value in os.environ.items() if name not in launching.RANK_VARIABLES}
        self.env |= {"SLURM_CONF": str(self.folder / "slurm.conf"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
                     "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"])}

    def start(self):
        """Munge, the controller, two node daemons; returns once both nodes are idle."""
        self._start_munge()
        ports = _free_ports(3)
        for name in ("state", "spool-n1", "spool-n2"):
            (self.folder / name).mkdir()
        host = socket.gethostname().split(".")[0]
        (self.folder / "slurm.conf").write_text(CONFIG.format(
            host=host, folder=self.folder, controller_port=ports[0], first_port=ports[1], last_port=ports[2],
            first_job=1 + int.from_bytes(os.urandom(2), "little")))
        self._run("slurmctld", "-D")
        for node in ("n1", "n2"):
            self._run("slurmd", "-D", "-N", node)
        self.wait_for(lambda: self.call("sinfo", "-h", "-o", "%T %D").split() == ["idle", "2"], START_S, "idle nodes")

    def _start_munge(self):
        folder = self.folder / "munge"
        folder.mkdir()
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o400)
        for path in (folder, folder / "key"):
            shutil.chown(path, "munge", "munge")
        self._run("runuser", "-u", "munge", "--", "munged", "--foreground", f"--socket={folder}/socket",
                  f"--key-file={folder}/key", f"--log-file={folder}/log", f"--pid-file={folder}/pid",
                  f"--seed-file={folder}/seed")
        self.wait_for(lambda: (folder / "socket").exists(), START_S, "munge")

    def _run(self, *command):
        out = open(self.folder / f"{command[0]}-{len(self._processes)}.out", "w")
        self._processes.append(subprocess.Popen(command, env=self.env, stdout=out, stderr=subprocess.STDOUT,
                                                stdin=subprocess.DEVNULL, start_new_session=True))

    def stop(self):
        """Cancel all jobs, end every daemon that was started, and remove the files."""
        if (self.folder / "slurm.conf").exists():
            subprocess.run(["scancel", "--user", getpass.getuser()], env=self.env, timeout=30, check=False)
            deadline = time.monotonic() + 40
            while time.monotonic() < deadline and self.call("squeue", "-h").strip():
                time.sleep(0.5)
        for process in reversed(self._processes):
            process.terminate()
        for process in reversed(self._processes):
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                launching._kill_tree(process.pid)
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def call(self, *command):
        """Output of a SLURM command; "" where it fails."""
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60, check=False,
                              cwd=launching.ROOT).stdout

    def submit(self, batch_file, *arguments, options=(), env=None):
        """Job id of a batch file of launch/slurm, for two ranks on CPUs; the output goes to a file of the test's."""
        command = ["sbatch", "--parsable", "--gpus-per-node=0", "--ntasks-per-node=1", "--cpus-per-task=1",
                   *options,
                   str(launching.ROOT / "launch" / "slurm" / batch_file), *arguments]
        done = subprocess.run(command, env=self.env | {"RANKS_PER_NODE": "1"} | (env or {}), capture_output=True,
                              text=True, timeout=60, check=False, cwd=launching.ROOT)
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split(";")[0])

    def job(self, number):
        """The fields that scontrol shows of a job."""
        shown = self.call("scontrol", "--oneliner", "show", "job", str(number))
        return dict(part.split("=", 1) for part in shown.split() if "=" in part)

    def wait_for_end(self, number, timeout_s, log):
        """The job's fields once it is over for good.

        SLURM starts a job that was put back after two minutes; here it does so after five seconds. Within the same
        second a node daemon would refuse it, its credential being revoked.
        """
        hurried = set()

        def over():
            fields = self.job(number)
            if fields["JobState"] == "PENDING" and fields["Restarts"] not in {"0"} | hurried:
                hurried.add(fields["Restarts"])
                self.call("scontrol", "update", f"JobId={number}", "StartTime=now+5")
            ended = fields["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
            # A job that is being put back shows the state of its first part for a moment, but is in the queue.
            return ended and not self.call("squeue", "-h", "-j", str(number)).strip()

        self.wait_for(over, timeout_s, f"the end of job {number}", log)
        return self.job(number)

    def wait_for(self, condition, timeout_s, what, log=None):
        """Until the condition holds; fails the test with the logs after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"no {what} within {timeout_s} s\n{self.logs(log)}", pytrace=False)
            time.sleep(0.5)

    def logs(self, log=None):
        """The ends of the daemons' logs and of a job's output."""
        paths = [*self.folder.glob("*.out"), *self.folder.glob("*.log"), *([log] if log else [])]
        return "\n".join(f"--- {path}\n{path.read_text()[-4000:]}" for path in paths if path.exists())


def _free_ports(count):
    """Neighbouring free ports; from a random place, since another cluster may look for some at the same time."""
    places = list(range(17000, 30000, 10))
    random.shuffle(places)
    for first in places:
        sockets = []
        try:
            for port in range(first, first + count):
                sockets.append(socket.socket())
                sockets[-1].bind(("0.0.0.0", port))
            return list(range(first, first + count))
        except OSError:
            continue
        finally:
            for opened in sockets:
                opened.close()
    raise RuntimeError("no free ports")


@pytest.fixture(scope="session")
def cluster():
    """The cluster; skips where it cannot be had."""
    reason = missing_reason()
    if reason:
        pytest.skip(reason)
    made = Cluster()
    # The daemons end with the tests also where a test runner is told to stop.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        made.start()
        yield made
    finally:
        made.stop()
        signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Folder of a tied tiny model."""
    return launching.make_model(tmp_path_factory.mktemp("model") / "tiny", tied=True)
