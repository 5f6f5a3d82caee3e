"""The scripts of launch/: how many ranks they start, on which GPUs, and what they refuse."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHOW = '#!/usr/bin/env bash\necho "gpus ${CUDA_VISIBLE_DEVICES-all}: $*"\n'


@pytest.fixture
def launch(tmp_path):
    """A function that runs a script with so many GPUs and these variables, and a python that shows what it got."""
    def start(script, num_gpus, **variables):
        gpus = "".join(f"echo 'GPU {number}'\n" for number in range(num_gpus)) or "exit 9\n"
        for name, text in (("nvidia-smi", f"#!/usr/bin/env bash\n{gpus}"), ("python", SHOW), ("srun", SHOW)):
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        env = {name: value for name, value in os.environ.items()
               if name not in ("CUDA_VISIBLE_DEVICES", "RANKS") and not name.startswith("SLURM_")}
        env |= {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"} | variables
        return subprocess.run(["bash", f"{ROOT}/launch/{script}", "--config", "c.yaml"], env=env, capture_output=True,
                              text=True, timeout=20, check=False)

    return start


@pytest.mark.parametrize("num_gpus, variables, shown", [
    (4, {}, "gpus all: --nproc-per-node=4"), (4, {"RANKS": "4"}, "gpus all: --nproc-per-node=4"),
    (4, {"RANKS": "2"}, "gpus 0,1: --nproc-per-node=2"), (8, {"CUDA_VISIBLE_DEVICES": "4,5,6"}, "gpus 4,5,6: 3"),
    (8, {"CUDA_VISIBLE_DEVICES": "4,5,6", "RANKS": "2"}, "gpus 4,5: --nproc-per-node=2"),
    (0, {"RANKS": "2"}, "gpus all: --nproc-per-node=2"),
    (8, {"CUDA_VISIBLE_DEVICES": "", "RANKS": "2"}, "gpus : --nproc-per-node=2"),  # hidden: CPU ranks
    (8, {"CUDA_VISIBLE_DEVICES": "-1", "RANKS": "2"}, "gpus -1: --nproc-per-node=2")])
def test_torchrun_starts_a_rank_a_gpu(launch, num_gpus, variables, shown):
    """All that are shown, or the first RANKS of them, which are then all that the ranks see."""
    done = launch("torchrun.sh", num_gpus, **variables)
    gpus, _, ranks = shown.partition(": ")
    assert done.returncode == 0 and done.stdout.startswith(gpus), done.stdout + done.stderr
    assert f"--nproc-per-node={ranks.rpartition('=')[2]} " in done.stdout
    assert done.stdout.endswith("-m spmd_rl.train --config c.yaml\n")


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4"}


@pytest.mark.parametrize("script, variables, words", [
    ("torchrun.sh", {}, "no GPU found and RANKS is ''"),
    ("torchrun.sh", {"CUDA_VISIBLE_DEVICES": ""}, "no GPU found and RANKS is ''"),
    ("torchrun.sh", {"RANKS": "two"}, "RANKS is 'two'"),
    ("torchrun.sh", {"CUDA_VISIBLE_DEVICES": "0,1", "RANKS": "3"}, "RANKS is 3, but this node shows 2 GPUs"),
    ("torchrun.sh", {"RANKS": "2", "SLURM_STEP_NUM_TASKS": "4"}, "srun started 4 tasks of it, 4 x 2 ranks"),
    ("srun_torchrun.sh", {}, "not inside of a SLURM job"), ("srun_direct.sh", {}, "not inside of a SLURM job"),
    ("srun_torchrun.sh", JOB | {"RANKS_PER_NODE": "5"}, "5 ranks a node, but the job has 4 GPUs a node"),
    ("srun_direct.sh", JOB | {"SLURM_NTASKS_PER_NODE": "8"}, "8 ranks a node, but the job has 4 GPUs a node"),
    ("srun_direct.sh", JOB | {"SLURM_GPUS_ON_NODE": "0"}, "no GPUs, no --ntasks-per-node and no RANKS_PER_NODE")])
def test_case_70_wrong_counts_are_refused_with_the_numbers(launch, script, variables, words):
    """Before anything starts: exit code 2 and one line."""
    done = launch(script, 0, **variables)
    assert done.returncode == 2 and done.stdout == "" and words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_srun_starts_a_task_a_gpu_that_sees_them_all(launch):
    """Ranks open each other's memory; a dead task ends all; variables of an outer launcher do not get in."""
    done = launch("srun_direct.sh", 4, **JOB, RANK="3", WORLD_SIZE="8")
    assert done.returncode == 0, done.stderr
    for option in ("--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--kill-on-bad-exit=1", "--gpu-bind=none"):
        assert f"{option} " in done.stdout


# Stands for every program that a script calls: shows what it got, and makes what make_prompts and make_model would.
STUB = """#!/usr/bin/env bash
echo "$(basename "$0") $*"
for word in "$@"; do if [[ $word == *.part ]]; then touch "$word"; fi; done
"""


@pytest.fixture
def checkout(tmp_path):
    """A function that runs a script of a copy of the project, whose programs show what they were given."""
    for name in ("launch", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "launch" / "setup_env.sh").write_text('echo "setup_env.sh $*"\n')
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text(f"PATH={tmp_path}/.venv/bin:$PATH\n")
    for name in ("python", "torchrun", "spmd-rl", "flake8", "mypy", "nvidia-smi"):
        path = tmp_path / ".venv" / "bin" / name
        path.write_text("#!/usr/bin/env bash\nexit 9\n" if name == "nvidia-smi" else STUB)
        path.chmod(0o755)
    (tmp_path / "data" / "quickstart").mkdir(parents=True)
    (tmp_path / "runs" / "quickstart-3").mkdir(parents=True)

    def start(*command):
        return subprocess.run(["bash", *command], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    return start


def test_the_quickstart_takes_a_seed(checkout):
    """`quickstart.sh --seed 3` is a run of its own on prompts of its own; the starting model is made once."""
    shown = []
    for _ in range(2):
        done = checkout("launch/quickstart.sh", "--seed", "3")
        assert done.returncode == 0, done.stdout + done.stderr
        shown.append(done.stdout)
        train, = [line for line in done.stdout.splitlines() if line.startswith("torchrun ")]
        assert "--nproc_per_node 2 " in train and "--data.train data/quickstart/train-3.jsonl" in train
        assert "--run.seed 3 --run.output_dir runs/quickstart-3 " in train
        assert "spmd-rl report runs/quickstart-3" in done.stdout
    assert shown[0].count("make_prompts.py") == 2 and shown[0].count("make_model.py") == 1
    assert "tools/" not in shown[1]


@pytest.mark.parametrize("arguments", [["--seed", "x"], ["--seed"], ["--sed", "3"], ["3"], ["--seed", "-1"]])
def test_the_quickstart_refuses_what_it_does_not_know(checkout, arguments):
    """With one line, before anything is set up."""
    done = checkout("launch/quickstart.sh", *arguments)
    assert done.returncode != 0 and "setup_env" not in done.stdout and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments, pytest_gets", [
    ([], "-m not long"), (["--all"], ""), (["--all", "-k", "x"], "-k x"), (["tests/unit"], "-m not long tests/unit")])
def test_the_tests_have_two_tiers(checkout, arguments, pytest_gets):
    """`tools/test.sh` leaves out the long tier, `--all` nothing; both run flake8 and mypy first."""
    done = checkout("tools/test.sh", *arguments)
    assert done.returncode == 0, done.stderr
    *before, last = done.stdout.splitlines()
    assert [line.split()[0] for line in before] == ["setup_env.sh", "flake8", "mypy"]
    assert last == f"python -m pytest -n 2 --dist loadfile {pytest_gets}".rstrip()
