"""The commands: each is reached, help is help, and a mistake exits with 2 and one line."""

import json

import pytest

from spmd_rl.cli import COMMANDS, main


@pytest.mark.parametrize("args", [[], ["-h"], ["--help"]])
def test_help_lists_the_commands(capsys, args):
    """Exit 0, on standard output, every command with what it does."""
    with pytest.raises(SystemExit) as exit_:
        main(args)
    shown = capsys.readouterr()
    assert exit_.value.code == 0 and shown.err == ""
    assert all(name in shown.out and what in shown.out for name, (_, what) in COMMANDS.items())


@pytest.mark.parametrize("name", ["trian", "", "--train", "spmd_rl.train"])
def test_an_unknown_command_exits_with_2(capsys, name):
    """On standard error, with the word that was not understood."""
    with pytest.raises(SystemExit) as exit_:
        main([name])
    shown = capsys.readouterr()
    assert exit_.value.code == 2 and shown.out == ""
    assert f"no command {name!r}" in shown.err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_its_own_help(capsys, command):
    """`spmd-rl COMMAND --help` is that command's, exit 0."""
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code in (0, None)
    assert "usage:" in capsys.readouterr().out


def test_arguments_go_to_the_command(capsys, tmp_path):
    """What follows the name is the command's: report on an empty folder is report's own error."""
    with pytest.raises(SystemExit) as exit_:
        main(["report", str(tmp_path)])
    assert exit_.value.code == 2 and "metrics.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("args, named", [
    (["--rollout.temprature", "1"], "temprature"), ([], "model.path"),
    (["--model.path", "no-such-folder"], "data.train"),
    (["--model.path", "x", "--data.train", "x", "--rollout.temperature", "0"], "rollout.temperature")])
def test_a_config_that_cannot_be_used_exits_with_2(capsys, args, named):
    """One message on standard error with the field; no traceback, no engine."""
    with pytest.raises(SystemExit) as exit_:
        main(["train", *args])
    shown = capsys.readouterr()
    assert exit_.value.code == 2
    assert named in shown.err and "Traceback" not in shown.err and shown.err.startswith("error: ")


def test_a_dry_run_prints_the_arithmetic_and_starts_nothing(capsys, tmp_path, model_folder):
    """4 prompts x 2 = 8 completions on one rank, 3 steps = 3 optimizer steps, 12 / 6 = 2 epochs; nothing is written."""
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"prompt": "p" * n, "answer": "1"}) + "\n" for n in (1, 2, 3, 4, 5, 6, 99)))
    main(["train", "--dry_run", "--model.path", model_folder("qwen3"), "--data.train", str(path),
          "--run.output_dir", str(tmp_path / "run"), "--run.max_steps", "3", "--batch.prompts_per_step", "4",
          "--rollout.num_generations", "2", "--data.max_prompt_length", "32"])
    shown = capsys.readouterr().out
    assert "4 prompts x 2 = 8 completions" in shown and "8 sequences a rank, 1 optimizer step" in shown
    assert "3 steps = 3 optimizer steps, 2 epochs of 6 prompts" in shown
    assert f"{path}: 1 rows dropped" in shown and "rows 6" in shown
    assert not (tmp_path / "run").exists()
