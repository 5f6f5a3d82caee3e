"""A run's page, from what a run leaves: whole in one file, for every kind of run, and safe for any text."""

import html.parser
import json
import re
import shutil
import subprocess

import pytest
import yaml

from spmd_rl.report import FIGURES, PHASES, main, page, read_run

pytest.importorskip("matplotlib")
EVALUATION = {"step": 0, "eval/reward": 0.25}
NASTY = '<script>alert("x")</script> & | `a` \x00 \ud800 \u202e 😀\n  <think>2</think>'


def step_row(step):
    return {"step": step, "reward": 0.1 * step, "completions/mean_length": 5.0, "completions/max_length": 9,
            "timing/step": 2.0, "kl": 0.01 * step, "memory/rollout_gib": 3.5, "rewards/exact/failed": 1,
            "clip_ratio/region_mean": 0.1, "entropy": 1.0, "sampling/sampling_logp_difference/mean": 0.01,
            **{f"timing/{phase}": 0.25 for phase in PHASES}}


def sample(step, text=NASTY):
    return {"step": step, "group": 0, "sample": 0, "prompt": text, "completion": text, "num_tokens": 3,
            "finish_reason": "stop", "reward": None, "rewards": {"exact": None}, "failures": {"exact": "timeout"},
            "advantage": 0.0}


ROWS = {
    "a run": [EVALUATION, step_row(1), step_row(2), {"step": 2, "eval/reward": 0.5}],
    "an evaluation alone": [EVALUATION],
    "several sets": [{"step": 0, "eval/a/reward": 0.1, "eval/b/reward": 0.2, "eval/b/pass@4": 0.5}],
    "no phase times": [{"step": 1, "reward": 0.5}],
    "a phase that comes later": [{"step": 1, "timing/step": 1.0}, step_row(2)],
    "an unknown row": [{"step": 1}],
    # Bare in files of earlier versions.
    "no number": [{"step": 1, "reward": float("nan"), "timing/step": 1.0, "timing/rollout": 0.5}],
    "no numbers": [step_row(1) | dict.fromkeys(("reward", "grad_norm", "loss", "kl", "entropy"), value)
                   for value in ("NaN", "Infinity", "-Infinity")],
    "some numbers": [step_row(1) | {"grad_norm": 1.0}, step_row(2) | {"grad_norm": "Infinity"},
                     step_row(3) | {"grad_norm": "NaN"}],
}


def write(folder, rows, samples=(), options=None, end=""):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + end)
    if samples:
        (folder / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    if options:
        (folder / "config.yaml").write_text(yaml.safe_dump(options))
    return str(folder)


class Page(html.parser.HTMLParser):
    """What a page consists of."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.addresses, self.ids, self.open = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "data", "action"):
                self.addresses.append(value)


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.filterwarnings("error")
def test_every_run_has_a_page(tmp_path, kind, capsys):
    """One file, without warnings, from a whole run and from one that has only begun; nothing in it is loaded from
    elsewhere, no script, and no name twice."""
    folder = write(tmp_path / "run", ROWS[kind], [sample(1), sample(2)])
    main([folder])
    assert capsys.readouterr().out.strip() == f"{folder}/report.html"
    assert (tmp_path / "run" / "report.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    made = Page(text)
    assert "script" not in made.tags and all(address.startswith("#") for address in made.addresses)
    assert not re.search(r"@import|url\((?!#)", text)
    assert len(made.ids) == len(set(made.ids))
    assert made.tags.count("h3") == 2


def test_the_figures_are_those_that_the_run_has_something_for(tmp_path):
    """Of a whole run: a figure for each of its metrics, the phases, and none that would be empty."""
    made = page([read_run(write(tmp_path / "run", ROWS["a run"]), "run")])
    titles = re.findall(r'<figure aria-label="(.*?)">', made)
    assert set(titles) == {"Reward (sampled)", "Held out", "Completion length (tokens)", "KL to the reference",
                           "Entropy", "Clipped tokens", "Sampler against policy", "Seconds a step",
                           "Memory by phase (GiB)", "Failed rewards", "Seconds a phase: run"}
    assert set(titles) <= set(FIGURES) | {"Seconds a phase: run"}
    assert made.count("<svg") == len(titles)


def test_the_memory_timeline_shows_who_is_on_the_device(tmp_path):
    """A figure of the last changes of phase, also where no tenant has a size (on a CPU)."""
    for name, tenants in (("gpu", {"KV cache": 30.0, "masters": 12.0}), ("cpu", {})):
        folder = write(tmp_path / name, ROWS["a run"])
        with open(f"{folder}/memory.jsonl", "w") as file:
            for number in range(50):
                line = {"time": 100.0 + number, "phase": "train", "used_gib": 44.0, "tenants_gib": tenants}
                file.write(json.dumps(line) + "\n")
        made = page([read_run(folder, name)])
        assert f"Memory timeline (GiB): {name}" in made


def test_any_text_is_shown_and_none_is_executed(tmp_path):
    """Tags, quotes, control characters and what is no Unicode: as text, or as their escapes."""
    made = page([read_run(write(tmp_path / "run", [EVALUATION], [sample(1)]), "run")])
    made.encode()
    shown = ("&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt; &amp; | `a` \\x00 \\ud800 \\u202e 😀\n"
             "  &lt;think&gt;")
    assert shown in made
    assert "exact timeout" in made


def test_runs_are_compared_in_the_same_figures(tmp_path, capsys):
    """One page for two runs: both in each figure's legend, the options that differ in a table, phases for each."""
    folders = [write(tmp_path / name, ROWS["a run"], options={"policy": {"learning_rate": rate, "optimizer": "adamw"},
                                                              "run": {"output_dir": name}})
               for name, rate in (("a", 1e-6), ("b", 2e-6))]
    main([*folders, "--output", str(tmp_path / "both.html")])
    text = (tmp_path / "both.html").read_text()
    assert capsys.readouterr().out.strip() == f"{tmp_path}/both.html"
    assert "policy.learning_rate" in text and "policy.optimizer" not in text and "output_dir" not in text
    assert "Seconds a phase: a" in text and "Seconds a phase: b" in text
    assert text.count('aria-label="Reward (sampled)"') == 1


def test_what_json_has_no_number_for_is_a_number_again(tmp_path):
    """A text of the same letters in a sample stays a text."""
    run = read_run(write(tmp_path / "run", ROWS["some numbers"], [sample(1, "NaN")]), "run")
    assert [repr(value) for value in run.series("grad_norm")[1]] == ["1.0", "inf", "nan"]
    assert run.samples[0]["completion"] == "NaN" and 'class="text">NaN<' in page([run])


@pytest.mark.parametrize("end", ["", '{"step": 3, "rew', '{"step": 3}'])
def test_a_last_line_that_was_cut_off_is_left_out(tmp_path, end):
    """A killed run's file reads up to its last whole line."""
    assert read_run(write(tmp_path / "run", ROWS["a run"], end=end), "run").rows == ROWS["a run"]


@pytest.mark.parametrize("kind", ["no folder", "no file", "empty", "one cut line"])
def test_a_run_without_metrics_is_an_error(tmp_path, capsys, kind):
    """Exit 2 with the file's name, no traceback."""
    folder = tmp_path / "run"
    if kind != "no folder":
        folder.mkdir()
    if kind in ("empty", "one cut line"):
        write(folder, [], end='{"st' if kind == "one cut line" else "")
    with pytest.raises(SystemExit) as exit_:
        main([str(folder)])
    assert exit_.value.code == 2
    assert f"{folder}/metrics.jsonl" in capsys.readouterr().err


@pytest.mark.skipif(not (shutil.which("chromium") or shutil.which("google-chrome")), reason="no browser here")
def test_a_browser_shows_the_page_without_network(tmp_path):
    """Chromium with every name unresolvable lays out all figures with a size, and reports no error."""
    folder = write(tmp_path / "run", ROWS["a run"], [sample(1)])
    main([folder])
    text = (tmp_path / "run" / "report.html").read_text()
    probe = """<script>document.title = JSON.stringify([...document.querySelectorAll("figure svg")].map(
        svg => svg.getBoundingClientRect()).map(box => [box.width, box.height]))</script>"""
    (tmp_path / "probed.html").write_text(text.replace("</body>", f"{probe}</body>"))
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    finished = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND",
         f"--user-data-dir={tmp_path}/profile", "--dump-dom", f"file://{tmp_path}/probed.html"],
        capture_output=True, text=True, timeout=120)
    sizes = json.loads(re.search(r"<title>(.*?)</title>", finished.stdout)[1])
    assert len(sizes) == text.count("<svg") > 5
    assert all(width > 200 and height > 100 for width, height in sizes), sizes
