"""A run's page, from what a run leaves."""

import json

import pytest

from spmd_rl.report import PHASES, draw, main, read_metrics

pytest.importorskip("matplotlib")
EVALUATION = {"step": 0, "eval/reward": 0.25}


def step_row(step):
    return {"step": step, "reward": 0.1 * step, "completions/mean_length": 5.0, "completions/max_length": 9,
            "timing/step": 2.0, **{f"timing/{phase}": 0.25 for phase in PHASES}}


ROWS = {
    "a run": [EVALUATION, step_row(1), step_row(2), {"step": 2, "eval/reward": 0.5}],
    "an evaluation alone": [EVALUATION],
    "no phase times": [{"step": 1, "reward": 0.5}],
    "a phase that comes later": [{"step": 1, "timing/step": 1.0}, step_row(2)],
    "an unknown row": [{"step": 1}],
    "no number": [{"step": 1, "reward": float("nan"), "timing/step": 1.0, "timing/rollout": 0.5}],
}


def write(folder, rows, end=""):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + end)
    return str(folder)


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.filterwarnings("error")
def test_every_run_has_a_picture(tmp_path, kind):
    """A PNG, without warnings, from a whole run and from one that has only begun."""
    path = str(tmp_path / "report.png")
    assert draw(ROWS[kind], path) == path
    with open(path, "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("end", ["", '{"step": 3, "rew', '{"step": 3}'])
def test_a_last_line_that_was_cut_off_is_left_out(tmp_path, end):
    """A killed run's file reads up to its last whole line."""
    folder = write(tmp_path / "run", ROWS["a run"], end)
    assert read_metrics(f"{folder}/metrics.jsonl") == ROWS["a run"]


def test_every_named_run_gets_its_picture(tmp_path, capsys):
    """One path a run is printed."""
    folders = [write(tmp_path / name, ROWS["a run"]) for name in ("a", "b")]
    main(folders)
    assert capsys.readouterr().out.split() == [f"{folder}/report.png" for folder in folders]
    assert all((tmp_path / name / "report.png").stat().st_size > 1000 for name in ("a", "b"))


@pytest.mark.parametrize("kind", ["no folder", "no file", "empty", "one cut line"])
def test_a_run_without_metrics_is_an_error(tmp_path, capsys, kind):
    """Exit 2 with the file's name, no traceback."""
    folder = tmp_path / "run"
    if kind != "no folder":
        folder.mkdir()
    if kind in ("empty", "one cut line"):
        write(folder, [], '{"st' if kind == "one cut line" else "")
    with pytest.raises(SystemExit) as exit_:
        main([str(folder)])
    assert exit_.value.code == 2
    assert f"{folder}/metrics.jsonl" in capsys.readouterr().err
