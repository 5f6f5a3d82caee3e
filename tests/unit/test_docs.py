"""The documents: what they name is there, and the page of options is that of the code."""

import json
import re
import typing
from pathlib import Path

import pytest
import torch
import yaml
from launching import load_tool

from spmd_rl.config import AdvantagesConfig, Config, LossConfig, as_dict, parse
from spmd_rl.losses import LOSSES, LossInputs, loss_metrics
from spmd_rl.metrics import completion_metrics
from spmd_rl.rewards import Rewards
from spmd_rl.train import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("launch/*.md")])
OPTIONS = {f"{section}.{key}" for section, values in as_dict(Config()).items() for key in values}
SECTIONS = set(as_dict(Config()))


def ids(path):
    return str(path.relative_to(ROOT))


def test_the_page_of_options_is_current():
    """Every option with its type, default and meaning: run tools/make_reference.py after a change of config.py."""
    tool = load_tool("make_reference")
    assert tool.PAGE.read_text() == tool.render()
    named = set(re.findall(r"^\| `([a-z_.0-9]+)` \|", tool.PAGE.read_text(), re.MULTILINE))
    assert named == OPTIONS


def test_the_readme_has_a_line_for_each_module():
    """In the tree; the architecture's table of levels has each too."""
    modules = {path.stem for path in (ROOT / "spmd_rl").glob("*.py")} - {"__init__"}
    tree = (ROOT / "README.md").read_text().split("```\nspmd_rl/")[1].split("\nlaunch/")[0]
    assert set(re.findall(r"^ +([a-z_]+)  ", tree, re.MULTILINE)) == modules
    table = (ROOT / "docs" / "architecture.md").read_text().split("| level | modules |")[1].split("\n\n")[0]
    assert set(re.findall(r"[a-z_]+", table)) == modules


ALGORITHMS = ROOT / "docs" / "algorithms.md"
CODE = re.compile(r"`([^`]+)`")


def test_the_page_of_algorithms_has_every_option():
    """Each field of the loss and the advantages is named, and each loss and each value of a field begins a row."""
    text = ALGORITHMS.read_text()
    first = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named, rows = (set(re.findall(r"\w+", " ".join(CODE.findall(part)))) for part in (text, " ".join(first)))
    assert set(LOSSES) <= rows
    for section in (LossConfig, AdvantagesConfig):
        for field, kind in typing.get_type_hints(section).items():
            assert field in named, field
            assert {value for value in typing.get_args(kind) if isinstance(value, str)} <= rows, field


@pytest.mark.parametrize("loss_type", [*LOSSES])
def test_the_page_of_algorithms_has_every_metric(completion, loss_type):
    """What a step of any loss reports of itself has a line in the table of healthy runs."""
    table = ALGORITHMS.read_text().split("| metric | healthy | sick |")[1]
    prefix, named = "", set()
    for name in (name for line in table.splitlines() if line.startswith("| `")
                 for name in CODE.findall(line.split("|")[1])):
        prefix = name.rpartition("/")[0] if "/" in name else prefix
        named |= {name, f"{prefix}/{name}"}  # `clip_ratio/low_mean`, `high_mean`
    one = torch.ones(1)
    inputs = LossInputs(one, one, one, one, torch.zeros(1, dtype=torch.long), one, one, ref_logprobs_N=one)
    found = set(loss_metrics(inputs, LossConfig(loss_type=loss_type, epsilon_high=5.0)))
    found |= set(completion_metrics([completion([1], rewards=[1.0], reward=1.0)], ["<name>"]))
    found |= {"loss", "grad_norm", "learning_rate", "optimizer/skipped_steps", "epoch", "resampling/rounds"}
    assert found - named == set()


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_to_files(page):
    """Every relative link of a page is a file of the project."""
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "log.md"], ids=ids)
def test_options_that_pages_name_exist(page):
    """`section.option` in a text, --section.option in a command, and the YAML blocks."""
    text = page.read_text()
    named = set(re.findall(r"`((?:%s)\.[a-z_0-9]+)\b" % "|".join(SECTIONS), text))
    named |= set(re.findall(r"--((?:%s)\.[a-z_0-9]+)" % "|".join(SECTIONS), text))
    modules = {f"{section}.{ending}" for section in SECTIONS for ending in ("md", "py", "yaml", "jsonl")}
    raw = {name for name in named if name.split(".")[0] in ("deepspeed", "vllm")}
    files = {name for name in named if (ROOT / "spmd_rl" / f"{name.split('.')[0]}.py").exists()
             and hasattr(__import__(f"spmd_rl.{name.split('.')[0]}", fromlist=["x"]), name.split(".")[1])}
    assert named - OPTIONS - modules - raw - files == set()
    for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL):
        found = yaml.safe_load(block)
        for section, values in found.items():
            if section in SECTIONS - {"deepspeed", "vllm"}:
                assert set(values) <= {option.partition(".")[2] for option in OPTIONS
                                       if option.startswith(f"{section}.")}, (section, values)


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_pages_are_tidy(page):
    """Fences are closed, and tables have as many cells in each row as in their head."""
    text = page.read_text()
    assert text.count("```") % 2 == 0
    width = 0
    for line in re.sub(r"```.*?```", "", text, flags=re.DOTALL).splitlines():
        cells = len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", line))) if line.startswith("|") else 0
        assert not width or not cells or cells == width, line
        width = cells


@pytest.mark.parametrize("path", sorted(ROOT.glob("launch/configs/*.yaml")), ids=ids)
def test_configs_are_read(path):
    """Every shipped config parses, and its rewards can be made."""
    config, _ = parse(["--config", str(path)])
    Rewards(config.rewards, config.rollout.max_completion_length)


def test_gsm8k_becomes_our_form(tmp_path, monkeypatch, capsys, model_folder):
    """The number after #### without its commas is the answer; the recipe's config takes what comes out."""
    tool = load_tool("make_gsm8k")
    rows = [{"question": "How many? ", "answer": "1,000 + 2 = <<1000+2=1002>>1,002 of them.\n#### 1,002"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "made" / "out.jsonl"
    monkeypatch.setattr("sys.argv", ["make_gsm8k", "--source", str(tmp_path / "in.jsonl"), "--output", str(output)])
    tool.main()
    row, = map(json.loads, output.read_text().splitlines())
    assert row["answer"] == "1002" and row["prompt"][0]["content"].startswith("How many? Let's think")
    pytest.importorskip("math_verify")
    main(["--config", str(ROOT / "launch/configs/gsm8k_qwen2.5_0.5b_1gpu.yaml"), "--dry_run", "--mesh.device", "cpu",
          "--model.path", model_folder("qwen2"), "--data.train", str(output), "--data.eval", str(output),
          "--run.output_dir", str(tmp_path / "run")])
    assert "64 prompts x 8 = 512 completions" in capsys.readouterr().out
    (tmp_path / "in.jsonl").write_text('{"question": "x", "answer": "no mark"}\n')
    with pytest.raises(SystemExit):
        tool.main()
    assert "in.jsonl, line 1: no ####" in capsys.readouterr().err
