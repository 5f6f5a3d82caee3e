"""The learning tool: its table and verdict from runs that are there, and a page that keeps the rest of its text."""

import json

import pytest


@pytest.fixture
def tool(tool_named, tmp_path, monkeypatch):
    """The tool with a page of its own and the inputs that it asks for."""
    module = tool_named("learning_curves")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{module.BEGIN}\nold\n{module.END}\nafter\n")
    monkeypatch.setattr(module, "PAGE", page)
    for name in ("model", "train", "heldout"):
        (tmp_path / name).touch()

    def started(*args, **kwargs):
        raise AssertionError("a run that is whole was started again")

    monkeypatch.setattr(module.subprocess, "run", started)
    return module


def call(tool, tmp_path, gains):
    """Its exit code on runs with these gains, from 0.25."""
    for loss, gain in gains.items():
        folder = tmp_path / "runs" / loss
        folder.mkdir(parents=True)
        rows = [{"step": 0, tool.ACCURACY: 0.25}, {"step": 1, "loss": 0.0}, {"step": 2, tool.ACCURACY: 0.25 + gain}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "summary.json").touch()
    inputs = [text for name in ("model", "train", "heldout") for text in (f"--{name}", str(tmp_path / name))]
    return tool.main([str(tmp_path / "runs"), *inputs, "--losses", *gains])


def test_the_page_gets_table_and_picture(tool, tmp_path):
    """Default +40 points, the others +33.6: 84 % of it, which is enough. Text outside of the marks stays."""
    gains = dict.fromkeys(tool.LOSSES, 0.336) | {tool.DEFAULT: 0.4}
    assert call(tool, tmp_path, gains) == 0
    text = tool.PAGE.read_text()
    assert text.startswith("before\n" + tool.BEGIN) and text.endswith(tool.END + "\nafter\n") and "old" not in text
    assert "| dapo | nothing | 0.250 → 0.650 | +40.0 points | 100 % |" in text
    assert "| grpo | `loss.loss_type: grpo` | 0.250 → 0.586 | +33.6 points | 84 % |" in text
    assert tool.PAGE.with_name(tool.PICTURE).read_bytes().startswith(b"\x89PNG")


def test_an_accuracy_that_is_no_number_is_one_to_the_tool(tool, tmp_path):
    """Written by name, since JSON has no infinity."""
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "{tool.ACCURACY}": {value}}}\n' for n, value in
                                                    enumerate(['"NaN"', '"-Infinity"', "0.5"])))
    assert repr(tool.curve(tmp_path)) == "[(0, nan), (1, -inf), (2, 0.5)]"


def test_a_loss_that_gains_too_little_is_an_error(tool, tmp_path, capsys):
    """79 % of the default's gain: the page says so, and so does the exit code."""
    gains = dict.fromkeys(tool.LOSSES, 0.4) | {"gspo": 0.316}
    assert call(tool, tmp_path, gains) == 1
    assert "below 80 % of the default's gain: gspo" in capsys.readouterr().out


def test_the_page_waits_for_all_losses(tool, tmp_path, capsys):
    """With one missing nothing is written, and it is named."""
    gains = {loss: 0.4 for loss in tool.LOSSES if loss != "sapo"}
    before = tool.PAGE.read_text()
    assert call(tool, tmp_path, gains) == 0
    assert "no whole run yet of sapo" in capsys.readouterr().out and tool.PAGE.read_text() == before


def test_a_page_without_its_marks_is_refused(tool, tmp_path):
    """Nothing is overwritten where the place is not clear."""
    tool.PAGE.write_text("no marks here\n")
    with pytest.raises(ValueError, match="once each"):
        call(tool, tmp_path, dict.fromkeys(tool.LOSSES, 0.4))
