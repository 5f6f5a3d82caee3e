"""Recorded rollouts come back as they were; what is no recording is refused by name."""

import pytest

from spmd_rl.config import ConfigError
from spmd_rl.recording import Recorder, read_step, recorded_steps


def test_a_step_comes_back_as_it_was(completion, tmp_path):
    """Every field of every completion, numbers bit for bit, in order; infinities and texts of any kind too."""
    made = [completion([3, 4], advantage=1 / 3, group=5, sample=1, logprobs=[-0.1, -1e-30], text='ü\n"\u2028"',
                       rewards=[None, 0.1 + 0.2], reward=float("-inf"), is_trained=False),
            completion([], prompt_ids=[1])]
    Recorder(str(tmp_path / "rollouts")).write(0, made)
    assert read_step(recorded_steps(str(tmp_path / "rollouts"))[0]) == made


def test_steps_are_in_order_of_number(completion, tmp_path):
    """10 comes after 9; a file that was not finished, and others' files, are none."""
    recorder = Recorder(str(tmp_path))
    for step in (10, 9, 0):
        recorder.write(step, [completion([step])])
    (tmp_path / "step-11.jsonl.writing").write_text("{")
    (tmp_path / "notes.jsonl").write_text("{}")
    assert [read_step(path)[0].token_ids for path in recorded_steps(str(tmp_path))] == [[0], [9], [10]]


@pytest.mark.parametrize("kind", ["no folder", "an empty one", "a file"])
def test_a_folder_without_recordings_is_refused(tmp_path, kind):
    """The message names the option and how such a folder comes to be."""
    folder = tmp_path / "here"
    if kind == "an empty one":
        folder.mkdir()
    elif kind == "a file":
        folder.write_text("")
    with pytest.raises(ConfigError, match="run.replay is .*here.*record_rollouts"):
        recorded_steps(str(folder))


@pytest.mark.parametrize("text", ["", "{", "[]\n", '{"group": 1}\n', '{"other": 1}\n'])
def test_a_file_of_something_else_is_refused(tmp_path, text):
    """With its path, and the line where there is one."""
    path = tmp_path / "step-0.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"step-0.jsonl{', line 1' if text else ''}"):
        read_step(str(path))
