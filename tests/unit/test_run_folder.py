"""What a run finds in its folder: earlier runs, checkpoints by number, whole ones and broken ones."""

import errno
import json
import os
from pathlib import Path

import pytest
import yaml

from spmd_rl import run_folder, sinks
from spmd_rl.config import Config, ConfigError, as_dict
from spmd_rl.sinks import JsonLines

FAULTS = {
    "truncated": (lambda path: os.truncate(path / "policy" / "b.pt", 2), "policy/b.pt has 2 bytes, not 4"),
    "empty": (lambda path: os.truncate(path / "rank-0.pt", 0), "rank-0.pt has 0 bytes, not 3"),
    "another byte": (lambda path: (path / "rank-0.pt").write_bytes(b"xyY"), "rank-0.pt has other bytes"),
    "a rank's file": (lambda path: (path / "rank-0.pt").unlink(), "rank-0.pt missing"),
    "a manifest": (lambda path: (path / "manifest.json").unlink(), "FileNotFoundError"),
    "half a manifest": (lambda path: os.truncate(path / "manifest.json", 30), "JSONDecodeError"),
}


def make_checkpoint(folder, step, world_size=2, config=None):
    path = folder / "checkpoints" / f"step-{step}"
    (path / "policy").mkdir(parents=True)
    (path / "policy" / "b.pt").write_bytes(b"abcd")
    (path / "rank-0.pt").write_bytes(b"xyz")
    (path / "metrics.jsonl").write_text("".join(f'{{"step": {n + 1}}}\n' for n in range(step)))
    state = {"step": step, "world_size": world_size, "config": as_dict(config or Config())}
    (path / "state.json").write_text(json.dumps(state))
    names = run_folder.files_below(str(path))
    run_folder.write_manifest(str(path), run_folder.manifest_entries(str(path), names))
    return path


@pytest.fixture
def config(tmp_path):
    """A config whose folder has a run of it: metrics of three steps and the config."""
    config = Config()
    config.run.output_dir = str(tmp_path / "run")
    run_folder.open_folder(config, None)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    return config


def names_in(folder):
    return sorted(os.listdir(folder))


def test_checkpoints_are_sorted_by_number(tmp_path):
    """10 is newer than 9; names that are not the program's, or not finished, are none."""
    for name in ("step-9", "step-10", "step-2", "step-11.writing", "step-12.removed", "step-x", "best"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    found = [os.path.basename(path) for path in run_folder.checkpoints(str(tmp_path))]
    assert found == ["step-10", "step-9", "step-2"]
    assert run_folder.checkpoints(str(tmp_path / "nowhere")) == []


@pytest.mark.parametrize("name", FAULTS)
def test_case_58_what_is_wrong_with_a_checkpoint_is_named(tmp_path, name):
    """Missing file, other size, other bytes, no whole manifest: each is a fault with the file's name."""
    path = make_checkpoint(tmp_path, 3)
    assert run_folder.fault(str(path)) is None
    spoil, words = FAULTS[name]
    spoil(path)
    assert words in run_folder.fault(str(path))


def test_each_rank_reads_its_share_of_the_bytes(tmp_path):
    """Sizes are looked at by all, bytes by the one whose share has the file."""
    path = make_checkpoint(tmp_path, 3)
    (path / "rank-0.pt").write_bytes(b"xyY")
    assert run_folder.fault(str(path), lambda names: [n for n in names if n != "rank-0.pt"]) is None
    assert "rank-0.pt" in run_folder.fault(str(path), lambda names: ["rank-0.pt"])


@pytest.mark.parametrize("keep, kept", [(1, ["step-10"]), (2, ["step-10", "step-9"]), (0, ["step-10"]),
                                        (9, ["step-10", "step-7", "step-9"])])
def test_rotation_is_by_number_and_keeps_the_newest(tmp_path, keep, kept):
    """Whatever is kept, the newest stays; leftovers of the program go, the user's own folders stay."""
    for step in (7, 10, 9):
        make_checkpoint(tmp_path, step)
    for name in ("step-11.writing", "step-9.replaced", "step-6.removed", "best", "step-7.mine"):
        (tmp_path / "checkpoints" / name).mkdir()
    run_folder.remove_old(str(tmp_path), keep)
    assert names_in(tmp_path / "checkpoints") == sorted([*kept, "best", "step-7.mine"])


def test_a_run_of_the_same_config_is_no_obstacle(config):
    """More steps, another layout and another place for checkpoints are the same run."""
    config.run.max_steps, config.run.max_train_minutes = 900, 5.0
    config.mesh.timeout_s, config.checkpoint.save_steps = 7.0, 3
    config.policy.zero_stage, config.batch.max_tokens_per_microbatch = 3, 512
    config.rollout.tensor_parallel_size, config.rollout.gpu_memory_utilization = 2, 0.3
    run_folder.check(config)


def test_a_run_of_another_config_is_refused_by_its_fields(config):
    """Every differing field with both values, and the ways out; nothing is touched."""
    before = names_in(config.run.output_dir)
    config.policy.learning_rate, config.vllm = 0.5, {"max_num_seqs": 8}
    with pytest.raises(ConfigError) as error:
        run_folder.check(config)
    assert "policy.learning_rate 1e-06 there, 0.5 here" in str(error.value)
    assert "vllm.max_num_seqs None there, 8 here" in str(error.value)
    assert "--checkpoint.resume never" in str(error.value) and "model.path" not in str(error.value)
    assert names_in(config.run.output_dir) == before
    config.checkpoint.resume = "never"
    run_folder.check(config)


def test_an_option_that_came_later_had_its_default(config, tmp_path):
    """A run of an older version goes on: what its config does not say was the default."""
    path = tmp_path / "run" / "config.yaml"
    written = yaml.safe_load(path.read_text())
    del written["rollout"]["top_p"], written["metrics"]
    path.write_text(yaml.safe_dump(written))
    run_folder.check(config)
    config.rollout.top_p = 0.5
    with pytest.raises(ConfigError, match="rollout.top_p 1.0 there, 0.5 here"):
        run_folder.check(config)


def test_another_optimizer_is_refused_by_path(config, tmp_path):
    """By path other options may differ, the layout among them (case 66), but an optimizer has no use for another's
    states: both are named, and the way out."""
    config.checkpoint.resume = str(make_checkpoint(tmp_path / "other", 3))
    config.policy.learning_rate, config.policy.zero_stage = 0.5, 3
    run_folder.check(config)
    config.policy.optimizer = "sgd"
    with pytest.raises(ConfigError, match="policy.optimizer is 'sgd'.* written with 'adamw'.*spmd-rl export"):
        run_folder.check(config)


def test_the_newest_whole_checkpoint_of_a_run(tmp_path):
    """The one given, or the newest by number that is whole; where there is none, what is wrong with each."""
    for step in (2, 9, 10):
        make_checkpoint(tmp_path, step)
    paths = [str(tmp_path / "checkpoints" / f"step-{step}") for step in (10, 9, 2)]
    assert run_folder.newest_whole(str(tmp_path)) == paths[0]
    assert run_folder.newest_whole(paths[2]) == paths[2]
    for path in paths[:2]:
        os.truncate(f"{path}/rank-0.pt", 1)
    assert run_folder.newest_whole(str(tmp_path)) == paths[2]
    with pytest.raises(ConfigError, match="step-10: rank-0.pt has 1 bytes, not 3"):
        run_folder.newest_whole(paths[0])
    with pytest.raises(ConfigError, match="no whole checkpoint: give the folder of a run"):
        run_folder.newest_whole(str(tmp_path / "nowhere"))


def test_a_path_without_a_checkpoint_is_refused(config, tmp_path):
    """A run's folder, or none at all, instead of a checkpoint's."""
    for path in (tmp_path / "run", tmp_path / "nowhere"):
        config.checkpoint.resume = str(path)
        with pytest.raises(ConfigError, match="checkpoint.resume.*no checkpoint there"):
            run_folder.check(config)


def test_a_new_run_moves_an_earlier_one_aside(config, tmp_path):
    """All that the program wrote goes into the next earlier-N; what the user put there stays."""
    folder = tmp_path / "run"
    make_checkpoint(folder, 3)
    for name in ("export", "export-2", "tensorboard", "exported", "earlier-4"):
        (folder / name).mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "completions.jsonl.writing").write_text("half")
    run_folder.open_folder(config, None)
    assert names_in(folder) == ["config.yaml", "earlier-4", "earlier-5", "exported", "notes.txt"]
    moved = ["checkpoints", "completions.jsonl.writing", "config.yaml", "export", "export-2", "metrics.jsonl",
             "tensorboard"]
    assert names_in(folder / "earlier-5") == moved


def test_a_folder_without_results_is_used_as_it_is(tmp_path):
    """Also after a run that died at its start: a config and an empty metrics.jsonl are nothing to keep. The folder is
    its owner's alone."""
    config = Config()
    config.run.output_dir = str(tmp_path / "deep" / "run")
    for _ in range(2):
        run_folder.open_folder(config, None)
        (tmp_path / "deep" / "run" / "metrics.jsonl").write_text("")
    assert names_in(config.run.output_dir) == ["config.yaml", "metrics.jsonl"]
    assert os.stat(config.run.output_dir).st_mode & 0o777 == 0o700


def test_a_run_that_goes_on_has_its_metrics_up_to_the_checkpoint(config, tmp_path):
    """Metrics of later steps go, as do later checkpoints, which are of a branch that is left: they are kept aside."""
    folder = tmp_path / "run"
    for step in (1, 2, 3):
        make_checkpoint(folder, step)
    run_folder.open_folder(config, str(folder / "checkpoints" / "step-2"))
    assert (folder / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert names_in(folder / "checkpoints") == ["step-1", "step-2"]
    assert names_in(folder / "earlier-1" / "checkpoints") == ["step-3"]


@pytest.mark.parametrize("what", ["config", "metrics", "samples"])
def test_a_start_that_is_cut_off_loses_nothing(config, monkeypatch, what):
    """A full disk, or a kill, in the middle of writing: the files of the run that was to go on are whole or as they
    were. With half a config the next start would be refused as another run's."""
    folder = Path(config.run.output_dir)
    checkpoint = make_checkpoint(folder, 2)
    (folder / "completions.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    before = {name: (folder / name).read_bytes() for name in ("config.yaml", "metrics.jsonl", "completions.jsonl")}

    def full(content, file, **kwargs):
        file.write("half")
        file.flush()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(run_folder.yaml, "safe_dump", full)
        if what == "metrics":
            patch.setattr(run_folder.shutil, "copyfileobj", full)
        if what == "samples":
            patch.setattr(sinks, "_line", lambda row: full(row, open(folder / "completions.jsonl.writing", "a")))
            JsonLines(str(folder), 2)
        run_folder.open_folder(config, str(checkpoint))
    if what == "config":
        before["metrics.jsonl"] = b'{"step": 1}\n{"step": 2}\n'  # replaced before it, by a whole one
    assert {name: (folder / name).read_bytes() for name in before} == before
    run_folder.check(config)
    run_folder.open_folder(config, str(checkpoint))
    JsonLines(str(folder), 2).close()
    assert len((folder / "completions.jsonl").read_text().splitlines()) == 2
    assert not any(name.endswith(".writing") for name in names_in(folder))


def test_a_run_may_go_on_from_another_folders_checkpoint(config, tmp_path):
    """Its history comes along; the run that was in the folder goes aside."""
    path = make_checkpoint(tmp_path / "other", 1)
    run_folder.open_folder(config, str(path))
    folder = tmp_path / "run"
    assert names_in(folder) == ["config.yaml", "earlier-1", "metrics.jsonl"]
    assert (folder / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert len((folder / "earlier-1" / "metrics.jsonl").read_text().splitlines()) == 3
