"""What the command line refuses, and --dry_run and --print_config: all before any engine is imported."""

import json

import pytest
import yaml
from launching import ROOT, run, torchrun, write_config

from spmd_rl.config import parse

WORKER = str(ROOT / "tests" / "e2e" / "worker_options.py")
TWO_RANKS = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                 MASTER_PORT="1")

# name: (options after --config, environment, what the message must contain). {folder} is the cases' folder.
REFUSED = {
    "unknown key": (["--rollout.temprature", "1"], {}, ["rollout.temprature"]),
    "unknown section in file": (["--config", "{folder}/unknown.yaml"], {}, ["rollouts"]),
    "wrong type": (["--rollout.num_generations", "many"], {}, ["rollout.num_generations", "many"]),
    "wrong choice": (["--policy.zero_stage", "4"], {}, ["policy.zero_stage", "4"]),
    "no such config file": (["--config", "{folder}/absent.yaml"], {}, ["absent.yaml"]),
    "config file is no YAML": (["--config", "{folder}/broken.yaml"], {}, ["broken.yaml"]),
    "prompts do not divide": (["--batch.prompts_per_step", "5"], TWO_RANKS,
                              ["batch.prompts_per_step is 5", "2 engines", "set 4 or 6"]),
    "ranks do not divide": (["--rollout.tensor_parallel_size", "3"], TWO_RANKS,
                            ["rollout.tensor_parallel_size is 3", "[1, 2]"]),
    "part of the rank variables": ([], {"WORLD_SIZE": "2"}, ["RANK", "torchrun"]),
    "temperature 0": (["--rollout.temperature", "0"], {}, ["rollout.temperature is 0", "above 0"]),
    "group of one": (["--rollout.num_generations", "1"], {}, ["rollout.num_generations is 1", "scale_rewards"]),
    "no model": (["--model.path", "{folder}/nowhere"], {}, ["model.path", "nowhere"]),
    "no data": (["--data.train", "{folder}/nowhere.jsonl"], {}, ["data.train", "nowhere.jsonl"]),
    "mixture of experts": (["--model.path", "{folder}/moe"], {}, ["model.path", "mixture-of-experts"]),
    "too long for the model": (["--data.max_prompt_length", "40000"], {},
                               ["data.max_prompt_length", "rollout.max_completion_length", "32768"]),
    "row without prompt": (["--data.train", "{folder}/no_prompt.jsonl"], {}, ["no_prompt.jsonl, line 2", "prompt"]),
    "empty data": (["--data.train", "{folder}/empty.jsonl"], {}, ["empty.jsonl", "no rows"]),
    "data is a folder": (["--data.train", "{folder}"], {}, ["data.train"]),
    "all prompts too long": (["--data.max_prompt_length", "2"], {}, ["64 rows", "data.max_prompt_length"]),
    "no answer column": (["--data.train", "{folder}/no_answer.jsonl"], {}, ["no_answer.jsonl", "'answer'"]),
    "unknown reward": (["--rewards.functions", "[exact_mach]"], {}, ["rewards.functions", "exact_mach", "exact_match"]),
    "no reward module": (["--rewards.functions", "[nowhere_at_all:reward]"], {},
                         ["rewards.functions", "nowhere_at_all"]),
    "no reward in module": (["--rewards.functions", "[json:reward]"], {}, ["rewards.functions", "json", "reward"]),
    "no reward file": (["--rewards.functions", "[{folder}/absent.py:reward]"], {}, ["rewards.functions", "absent.py"]),
    "bad pattern": (["--rewards.functions", "[regex]", "--rewards.regex_pattern", "("], {}, ["rewards.regex_pattern"]),
    "no loss module": (["--loss.loss_type", "nowhere_at_all:loss"], {}, ["loss.loss_type", "nowhere_at_all"]),
    "no advantages function": (["--advantages.function", "json:nothing"], {}, ["advantages.function", "nothing"]),
    "evaluation without data": (["--evaluate.eval_steps", "2"], {}, ["evaluate.eval_steps is 2", "data.eval"]),
    "DeepSpeed's stage": (["--deepspeed.zero_optimization", '{"stage": 1}'], {},
                          ["deepspeed.zero_optimization.stage is 1", "policy.zero_stage"]),
    "vLLM's seed": (["--vllm.seed", "3"], {}, ["vllm.seed is 3", "run.seed"]),
    "LoRA": (["--vllm.enable_lora", "true"], {}, ["vllm.enable_lora", "LoRA"]),
    "sequence parallelism": (["--deepspeed.sequence_parallel_size", "2"], {},
                             ["deepspeed.sequence_parallel_size", "sequence parallelism"]),
    "expandable segments": ([], {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"},
                            ["PYTORCH_CUDA_ALLOC_CONF", "expandable_segments"]),
    "output is a file": (["--run.output_dir", "{folder}/empty.jsonl"], {}, ["run.output_dir", "empty.jsonl"]),
}


@pytest.fixture(scope="module")
def folder(model, prompts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("options")
    write_config(folder / "config.yaml", model, prompts / "train.jsonl", folder / "run",
                 rewards={"functions": ["exact_match"]})
    (folder / "unknown.yaml").write_text("rollouts: {temperature: 1.0}\n")
    (folder / "broken.yaml").write_text("run: {seed: 1\nmodel: [\n")
    (folder / "no_prompt.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"question": "1+1="}\n')
    (folder / "no_answer.jsonl").write_text('{"prompt": "1+1="}\n')
    (folder / "empty.jsonl").write_text("\n  \n")
    (folder / "moe").mkdir()
    (folder / "moe" / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 8}))
    return folder


@pytest.fixture(scope="module")
def results(folder, prompts):
    """{case: result} of one process that calls the program for each."""
    base = ["--config", str(folder / "config.yaml")]
    cases = {name: {"arguments": base + [option.replace("{folder}", str(folder)) for option in options], "env": env}
             for name, (options, env, _) in REFUSED.items()}
    cases["print_config"] = {"arguments": base + ["--loss.beta", "0.25", "--print_config"]}
    cases["dry_run"] = {"arguments": base + ["--dry_run"], "env": TWO_RANKS}
    cases["dry_run on the second rank"] = {"arguments": base + ["--dry_run"], "env": TWO_RANKS | {"RANK": "1"}}
    cases["help"] = {"arguments": ["--help"]}
    (folder / "cases.json").write_text(json.dumps(cases))
    run([WORKER, str(folder / "cases.json"), str(folder / "results.json")]).succeeded()
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_field_value_and_fix(results, folder, name):
    """Exit code 2, one message on standard error that names the field, what it is and what to set; no traceback, no
    engine, no run folder."""
    result = results[name]
    assert result["code"] == 2, result
    assert result["stderr"].startswith("error: ") and result["stderr"].count("error: ") == 1, result["stderr"]
    assert "Traceback" not in result["stderr"]
    for part in REFUSED[name][2]:
        assert part in result["stderr"], result["stderr"]
    assert result["engines"] == []
    assert not (folder / "run").exists()


def test_dry_run_prints_the_batch_arithmetic(results, folder):
    """4 prompts x 4 completions over 2 ranks: 16 completions, 2 prompts an engine, 8 sequences a rank, one optimizer
    step. Only the first rank prints; nothing is started or written."""
    result = results["dry_run"]
    assert result["code"] == 0 and result["stderr"] == "", result
    for part in ("2 ranks: 2 engines of 1", "4 prompts x 4 = 16 completions", "2 prompts an engine",
                 "8 sequences a rank", "1 optimizer step", "64 prompts"):
        assert part in result["stdout"], result["stdout"]
    assert results["dry_run on the second rank"]["stdout"] == ""
    assert result["engines"] == [] and not (folder / "run").exists()


def test_print_config_is_a_config(results, folder, capsys):
    """--print_config prints the resolved config as YAML: the file's values, the options' over them, and defaults."""
    result = results["print_config"]
    assert result["code"] == 0 and result["engines"] == []
    printed = yaml.safe_load(result["stdout"])
    assert printed["loss"]["beta"] == 0.25 and printed["rollout"]["num_generations"] == 4
    assert printed["rollout"]["top_p"] == 1.0 and printed["policy"]["zero_stage"] == 2
    (folder / "printed.yaml").write_text(result["stdout"])
    with pytest.raises(SystemExit) as exit_:
        parse(["--config", str(folder / "printed.yaml"), "--print_config"])
    assert not exit_.value.code and yaml.safe_load(capsys.readouterr().out) == printed


def test_help_has_a_line_of_meaning_an_option(results):
    """--help shows each option with its meaning and its default."""
    text = " ".join(results["help"]["stdout"].split())
    assert results["help"]["code"] == 0
    assert "--rollout.num_generations" in text and "the group that advantages compare" in text
    assert "default: 8" in text


def test_plain_process_exits_with_2(folder):
    """The process itself, not only main, exits with 2 and prints the message alone."""
    finished = run(["-m", "spmd_rl.train", "--config", str(folder / "config.yaml"), "--loss.epsilon", "1.5"])
    assert finished.returncode == 2
    assert finished.output.splitlines() == ["error: loss.epsilon is 1.5: set it to 0 or more and below 1"]


def test_two_ranks_print_one_message(folder):
    """Under torchrun the first rank alone says what is wrong."""
    finished = torchrun(2, ["-m", "spmd_rl.train", "--config", str(folder / "config.yaml"), "--batch.prompts_per_step",
                            "5"])
    assert finished.returncode != 0
    assert finished.output.count("error: batch.prompts_per_step is 5") == 1
    assert "exitcode  : 2" in finished.output
