"""The documents: what they name is there, and the page of options is that of the code."""

import json
import os
import re
import typing
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from launching import load_tool
from transformers import AutoModelForCausalLM

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


# Of torchrun, sbatch, srun, sacct, scancel, tensorboard and containers.
FOREIGN = {"--nproc_per_node", "--standalone", "--array", "--full", "--logdir", "--ipc", "--pid", "--container-image",
           "--distribution", "--format"}


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_flags_that_pages_name_exist(page):
    """Each --flag without a section is one of the project's sources, or of a program that it is started by."""
    ours = "".join(path.read_text() for folder in ("spmd_rl", "launch", "tools") for path in (ROOT / folder).rglob("*")
                   if path.suffix in (".py", ".sh", ".sbatch"))
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*(?![\w.-]*\.\w)", page.read_text()))
    assert {flag for flag in named if flag not in ours} <= FOREIGN


def commands_of(page):
    """Words of each command in a page's bash blocks, without the texts that are given to them (<<'END')."""
    found = []
    for block in re.findall(r"```bash[^\n]*\n(.*?)```", page.read_text(), re.DOTALL):
        block = re.sub(r"<<'(\w+)'(.*?)\n.*?\n\1\n", r"\2\n", block, flags=re.DOTALL).replace("\\\n", " ")
        found += [words for line in block.splitlines() if (words := shlex.split(line, comments=True))]
    return found


def flags_of(words):
    """--flag of each word that is one."""
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def program_of(words):
    """(its source, the words for it, the words for the launcher in front of it)."""
    if words[0] in ("python", "torchrun") and "-m" in words:
        at = words.index("-m") + 1
        module, rest = words[at], words[at + 1:]
        if module == "spmd_rl.cli":
            return program_of(["spmd-rl", *rest])[0], rest[1:], words[1:at - 1]
        return ROOT / f"{module.replace('.', '/')}.py", rest, words[1:at - 1]
    if words[0] == "spmd-rl":
        return ROOT / "spmd_rl" / {"eval": "train.py", "logprobs": "inference.py"}.get(words[1], f"{words[1]}.py"), \
            words[2:], []
    scripts = [at for at, word in enumerate(words) if re.match(r"(\$SPMD_RL/)?(launch|tools)/", word)]
    if words[0] in ("python", "bash", "sbatch") and scripts:
        at = scripts[0]
        return ROOT / words[at].removeprefix("$SPMD_RL/"), words[at + 1:], words[1:at]
    return None, [], []


LAUNCHERS = {"torchrun": {"--standalone", "--nproc_per_node"}, "sbatch": {"--nodes", "--time", "--array"}}
ELSEWHERE = {"source", "export", "cat", "cd", "mv", "tail", "tensorboard"}


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_are_understood(page, tmp_path, monkeypatch):
    """Every command of a page names a program that is there, with options that it takes: a run's are parsed with the
    config that they name, a script's stand in its source."""
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    (tmp_path / "my_run.yaml").write_text(
        re.search(r"```yaml\n# my_run.yaml.*?\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1])
    monkeypatch.chdir(tmp_path)
    for words in commands_of(page):
        source, own, launcher = program_of(words)
        if source is None:
            assert words[0] in ELSEWHERE or words[:2] == ["python", "-"], words
            continue
        assert flags_of(launcher) <= LAUNCHERS.get(words[0], set()), words
        if source == ROOT / "pytest.py":
            assert all(os.path.exists(ROOT / path) for path in own), words
            continue
        text = source.read_text()
        if source.name == "train.py" or "-m spmd_rl.train" in text or source.suffix == ".sbatch":
            parse(own)
        elif source.name == "inference.py":
            parse([word for at, word in enumerate(own) if not {"--input", "--output"} & {word, own[at - 1]}])
        else:
            assert all(flag in text for flag in flags_of(own)), words


TOOLS_OF_README = [words for words in commands_of(ROOT / "README.md") if words[0] == "python" and "tools/" in words[1]]


def test_the_readmes_inputs_are_made(tmp_path, monkeypatch, capsys):
    """Its commands as they stand, on a smaller model and for fewer rows: a folder that Transformers loads, and prompts
    of 26 numbers with four digits."""
    pytest.importorskip("reasoning_gym")
    monkeypatch.chdir(tmp_path)
    for words in TOOLS_OF_README:
        tool = load_tool(Path(words[1]).stem)
        fewer = []
        if "--preset" in words:
            name = words[words.index("--preset") + 1]
            small = tool.PRESETS[name] | dict(hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
                                              vocab_size=320, intermediate_size=48)
            monkeypatch.setitem(tool.PRESETS, name, small)
        else:
            fewer = ["--num_train", "8", "--num_heldout", "2"]
        monkeypatch.setattr("sys.argv", [*words[1:], *fewer])
        tool.main()
    assert len(TOOLS_OF_README) == 2
    assert AutoModelForCausalLM.from_pretrained("data/qwen3-1.7b").dtype == torch.bfloat16
    for name, count in (("train", 8), ("heldout", 2)):
        rows = [json.loads(line) for line in Path(f"data/qwen3-1.7b-{name}.jsonl").read_text().splitlines()]
        assert len(rows) == count
        assert all(len(re.findall(r"\b\d{4}\b", row["prompt"])) == 26 for row in rows), rows[0]


def test_flags_of_the_readme_are_run_by_a_test():
    """What a reader tries first is what the tests do: each --flag of the README stands in a test, or is run from the
    page itself."""
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    shown = set(re.findall(r"(?<![\w-])--[a-z][\w.]*\w", (ROOT / "README.md").read_text()))
    run = {flag for words in TOOLS_OF_README for flag in flags_of(words)}
    run |= {flag for flag in shown if re.search(rf"[\"' ]{re.escape(flag)}[\"'= ]", tests)}
    assert shown - run == set() and len(shown) > 12


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
