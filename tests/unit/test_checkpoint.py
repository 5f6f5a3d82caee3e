"""Saving: in the step or beside it, and what is left when the disk, a signal or an error comes in between."""

import errno
import os
import signal
import subprocess
import threading

import pytest
import torch

from spmd_rl import checkpoint, run_folder, shards
from spmd_rl.checkpoint import Progress, Saver
from spmd_rl.config import Config, ConfigError
from spmd_rl.shards import Shards, cut
from spmd_rl.signals import StopRequest

ELEMENTS = 100_000


class Engine:
    """Stands for the policy: two tensors with a moment each."""

    def __init__(self):
        self.tensors = {name: torch.arange(ELEMENTS, dtype=torch.float32) for name in ("a", "b")}
        self.moments = {name: torch.zeros(ELEMENTS) for name in ("a", "b")}

    def pieces(self):
        for name in self.tensors:
            yield from cut("master", name, 0, self.tensors[name])
            yield from cut("exp_avg", name, 0, self.moments[name])

    def shapes(self):
        return {name: (ELEMENTS,) for name in self.tensors}

    def progress(self):
        return {"num_updates": 3}

    def step(self):
        for tensor in (*self.tensors.values(), *self.moments.values()):
            tensor.add_(1)


class Mesh1:
    """A mesh of one rank whose failure is noted: the real one ends the process."""

    def __init__(self, mesh):
        self._mesh, self.failures = mesh, []

    def __getattr__(self, name):
        return getattr(self._mesh, name)

    def fail(self, error, phase=None):
        self.failures.append((error, phase))


@pytest.fixture(params=[False, True], ids=["in the step", "beside"])
def background(request):
    return request.param


@pytest.fixture
def made(tmp_path, mesh, background):
    """(saver, engine, mesh, the run's folder) of a config that keeps two."""
    config = Config()
    config.run.output_dir = str(tmp_path / "run")
    config.checkpoint.background = background
    run_folder.open_folder(config, None)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    engine, mesh = Engine(), Mesh1(mesh)
    return Saver(config, mesh, engine, None), engine, mesh, tmp_path / "run"


def save(saver, step):
    saver.save(Progress(step, step))
    saver.finish()


def names_in(folder):
    return sorted(os.listdir(folder / "checkpoints"))


def first_elements(folder, step):
    """Of the first tensor and its moment."""
    with Shards(str(folder / "checkpoints" / f"step-{step}" / "policy")) as found:
        return [float(found.whole(kind, "a")[0]) for kind in ("master", "exp_avg")]


def test_each_save_has_the_tensors_of_its_step(made):
    """Also where the next steps change them while it is written; the newest two stay."""
    saver, engine, _, folder = made
    for step in (1, 2, 3):
        engine.step()
        saver.save(Progress(step, step))
    engine.step()
    saver.finish()
    assert names_in(folder) == ["step-2", "step-3"]
    for step in (2, 3):
        assert run_folder.fault(str(folder / "checkpoints" / f"step-{step}")) is None
        assert first_elements(folder, step) == [step, step]
    state = run_folder.read_state(str(folder / "checkpoints" / "step-3"))
    assert state["step"] == 3 and state["policy"] == {"num_updates": 3}


@pytest.mark.parametrize("background", [True], ids=["beside"])
def test_beside_the_steps_only_the_copy_is_waited_for(made, monkeypatch):
    """While the writer stands still the save returns, the step goes on, and the checkpoint has no name yet; `advance`
    gives it one once the writer is done, and not before. The next save waits for the one before it."""
    saver, engine, _, folder = made
    may_write, write = threading.Event(), shards.write

    def waiting(*arguments):
        assert may_write.wait(30), "nothing lets the writer go on"
        return write(*arguments)

    monkeypatch.setattr(checkpoint.shards, "write", waiting)
    saver.save(Progress(1, 1))
    engine.step()
    saver.advance()
    assert names_in(folder) == ["step-1.writing"]
    may_write.set()
    saver._pending.thread.join()
    assert names_in(folder) == ["step-1.writing"]
    saver.advance()
    assert names_in(folder) == ["step-1"] and first_elements(folder, 1) == [0, 0]
    saver.advance()
    saver.finish()  # nothing is left to do


def test_a_full_disk_or_an_error_leaves_the_last_checkpoint(made, monkeypatch):
    """The error is the run's end, at once also where the steps go on beside; what was there is whole, and the next save
    clears what was left half-written."""
    saver, engine, mesh, folder = made
    save(saver, 1)

    def full(tensors, path, metadata):
        with open(path, "wb") as file:
            file.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "save_file", full)
        if saver._config.checkpoint.background:
            saver.save(Progress(2, 2))
            saver._pending.thread.join()
            (error, phase), = mesh.failures
            assert phase == "save" and error.errno == errno.ENOSPC
            saver._pending = None  # a real failure ends the process
        else:
            with pytest.raises(OSError, match="No space left on device"):
                saver.save(Progress(2, 2))
    assert names_in(folder) == ["step-1", "step-2.writing"]
    assert run_folder.fault(str(folder / "checkpoints" / "step-1")) is None
    save(saver, 3)
    assert names_in(folder) == ["step-1", "step-3"]


@pytest.fixture
def small_disk(made):
    """A tmpfs with room for one checkpoint and a half at the run's checkpoints; skips where nothing can be mounted."""
    path = made[3] / "checkpoints"
    path.mkdir()
    size = 4 * 4 * ELEMENTS * 3 // 2
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True,
                          text=True, check=False)
    if done.returncode:
        pytest.skip(f"no mount here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.mark.parametrize("background", [False], ids=["in the step"])
@pytest.mark.parametrize("how", ["full", "read-only"])
def test_a_real_full_or_read_only_disk_keeps_what_is_good(made, small_disk, how):
    """A sized tmpfs, and one that has become read-only: the second save is an error that names the cause, and the first
    checkpoint is whole; with the disk as it should be the next save succeeds."""
    saver, engine, _, folder = made
    save(saver, 1)
    if how == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(Exception, match="[Nn]o space left|os error 28|Read-only file system"):
        save(saver, 2)
    assert run_folder.fault(str(small_disk / "step-1")) is None
    assert first_elements(folder, 1) == [0, 0]
    subprocess.run(["mount", "-o", f"remount,rw,size={2**26}", str(small_disk)], check=True)
    save(saver, 3)
    assert names_in(folder) == ["step-1", "step-3"]


def test_signals_during_a_save_harm_nothing(made, monkeypatch):
    """The first is noted, more change nothing, wherever in the save they come."""
    saver, _, _, folder = made
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    write, replace = shards.save_file, checkpoint.replace_folder

    def interrupted(function):
        def call(*arguments):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGUSR1)
            function(*arguments)
            os.kill(os.getpid(), signal.SIGTERM)
        return call

    monkeypatch.setattr(shards, "save_file", interrupted(write))
    monkeypatch.setattr(checkpoint, "replace_folder", interrupted(replace))
    try:
        stop = StopRequest(0)
        save(saver, 1)
        assert stop.reason() in ("SIGTERM", "SIGUSR1")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert names_in(folder) == ["step-1"]
    assert run_folder.fault(str(folder / "checkpoints" / "step-1")) is None


def test_files_that_another_host_does_not_see_are_an_error(made, monkeypatch):
    """A folder that is not shared after all: the checkpoint gets no name."""
    saver, _, _, folder = made
    monkeypatch.setattr(checkpoint, "SEEN_WITHIN_S", 0.6)
    monkeypatch.setattr(checkpoint, "files_below", lambda path: ["state.json"])
    with pytest.raises(RuntimeError, match="lacks .*policy/rank-0-0.safetensors.*that all hosts share"):
        save(saver, 1)
    assert names_in(folder) == ["step-1.writing"]


def test_files_that_another_host_sees_late_are_waited_for(made, monkeypatch):
    """NFS shows another host's new files once its cache of the folder is old enough."""
    saver, _, _, folder = made
    looks = []

    def late(path):
        looks.append(path)
        return run_folder.files_below(path) if len(looks) > 2 else ["state.json"]

    monkeypatch.setattr(checkpoint, "files_below", late)
    save(saver, 1)
    assert len(looks) == 3 and names_in(folder) == ["step-1"]
    assert run_folder.fault(str(folder / "checkpoints" / "step-1")) is None


def test_a_rank_that_the_run_had_not_keeps_its_generators(made, mesh):
    """More ranks than before: theirs are those of the start."""
    saver, _, _, folder = made
    save(saver, 1)
    path = str(folder / "checkpoints" / "step-1")
    wanted = torch.rand(1)
    checkpoint.load_generators(path, mesh)
    assert torch.equal(torch.rand(1), wanted)
    os.rename(f"{path}/rank-0.pt", f"{path}/rank-7.pt")
    state = torch.get_rng_state()
    checkpoint.load_generators(path, mesh)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("background", [False], ids=["in the step"])
@pytest.mark.parametrize("spoil", ["truncate", "empty", "remove"])
def test_case_58_the_newest_whole_one_is_chosen_and_the_skipped_are_named(made, mesh, capsys, spoil):
    """By number, skipping broken ones aloud; where none is whole the run does not begin anew by itself."""
    saver, _, _, folder = made
    for step in (9, 10):
        save(saver, step)
    paths = [str(folder / "checkpoints" / f"step-{step}") for step in (10, 9)]
    assert checkpoint.choose(saver._config, mesh) == paths[0]
    for number, path in enumerate(paths):
        file = f"{path}/policy/rank-0-0.safetensors"
        if spoil == "remove":
            os.remove(file)
        else:
            os.truncate(file, 0 if spoil == "empty" else os.path.getsize(file) // 2)
        if number == 0:
            assert checkpoint.choose(saver._config, mesh) == paths[1]
            assert f"checkpoint skipped, it is not whole: {paths[0]}: policy/rank-0-0" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no checkpoint is whole.*step-10.*step-9.*--checkpoint.resume never"):
        checkpoint.choose(saver._config, mesh)
    saver._config.checkpoint.resume = paths[0]
    with pytest.raises(ConfigError, match="no checkpoint is whole"):
        checkpoint.choose(saver._config, mesh)
    saver._config.checkpoint.resume = "never"
    assert checkpoint.choose(saver._config, mesh) is None
