"""``spmd-rl eval`` and ``spmd-rl logprobs`` on a saved model, and what a training run evaluates: the same numbers for
any number of ranks, and those of plain Transformers."""

import json
import re

import pytest
import torch
from launching import Once, make_rows, needs_cpu_engine, run, torchrun, write_config, write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer

from spmd_rl import report

RANKS = [1, 2, pytest.param(4, marks=pytest.mark.long)]
TEMPERATURE = 0.7


def launch(num_ranks, arguments, cwd=None):
    arguments = ["-m", "spmd_rl.cli", *arguments]
    return run(arguments, cwd=cwd) if num_ranks == 1 else torchrun(num_ranks, arguments, cwd=cwd)


# Evaluation. ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evaluated(model, prompts, tmp_path_factory):
    """A function from a number of ranks to (eval.json, samples) of 4 completions a prompt on two held-out sets."""
    base = tmp_path_factory.mktemp("eval")
    other = write_jsonl(base / "other.jsonl", make_rows(7, seed=5))

    def evaluate(num_ranks, batched_tokens=None):
        folder = base / f"ranks-{num_ranks}-{batched_tokens}"
        config = write_config(
            base / f"{folder.name}.yaml", model, "", folder,
            vllm={"max_num_batched_tokens": batched_tokens, "max_num_seqs": 16} if batched_tokens else {},
            data={"eval": [str(prompts / "heldout.jsonl"), str(other)]},
            rewards={"functions": ["regex", "exact_match"]}, evaluate={"num_generations": 4, "temperature": 1.0})
        launch(num_ranks, ["eval", "--config", str(config)]).succeeded()
        samples = [json.loads(line) for line in (folder / "eval_samples.jsonl").read_text().splitlines()]
        return json.loads((folder / "eval.json").read_text()), samples

    return Once(evaluate)


@needs_cpu_engine
@pytest.mark.parametrize("num_ranks", RANKS)
def test_evaluation_gives_the_same_for_any_number_of_ranks(evaluated, num_ranks):
    """Every metric and every completion is that of one rank, bit by bit: ranks share the prompts, and each request has
    its own seed."""
    (found, samples), (wanted, wanted_samples) = evaluated(num_ranks), evaluated(1)
    assert {k: v for k, v in found.items() if "timing" not in k} == {
        k: v for k, v in wanted.items() if "timing" not in k}
    assert samples == wanted_samples


@needs_cpu_engine
def test_prompts_that_do_not_fit_one_pass_change_nothing(evaluated):
    """68 requests in passes of few tokens: vLLM would read a part of a prompt, and fails there on a CPU where requests
    have seeds ("CPU Generator does not use offset")."""
    assert evaluated(1, 40)[1] == evaluated(1)[1]


@needs_cpu_engine
def test_evaluation_adds_up(evaluated):
    """The metrics are those of the samples that are written; pass@4 is the share of prompts with a right one."""
    found, samples = evaluated(1)
    for name, count in (("heldout", 10), ("other", 7)):
        own = [sample for sample in samples if sample["set"] == name]
        assert len(own) == 4 * count
        groups = [[s["rewards"]["regex"] for s in own if s["group"] == group] for group in range(count)]
        assert found[f"eval/{name}/rewards/regex/mean"] == pytest.approx(sum(map(sum, groups)) / (4 * count))
        assert found[f"eval/{name}/pass@4"] == pytest.approx(sum(max(group) for group in groups) / count)
        assert found[f"eval/{name}/pass@1"] == pytest.approx(found[f"eval/{name}/rewards/regex/mean"])
        assert found[f"eval/{name}/pass@1"] <= found[f"eval/{name}/pass@2"] <= found[f"eval/{name}/pass@4"]
    assert 0 < found["eval/heldout/pass@1"] < 1


POISON = """
import os, time

def poison(completions, **columns):
    if "7" in completions[0]:
        time.sleep(1000)
    if "8" in completions[0]:
        os._exit(1)
    return [float(completions[0][:1] < "5")]
"""


@needs_cpu_engine
def test_a_run_of_everything_that_users_touch(model, prompts, tmp_path):
    """Two ranks, parquet and JSONL mixed, held out in two sets, a reward that hangs and dies on some completions,
    samples at each step, a profile: all steps are made, and greedy evaluation of the first model is that of
    ``spmd-rl eval``."""
    datasets = pytest.importorskip("datasets")
    (tmp_path / "mine.py").write_text(POISON)
    rows = make_rows(20, seed=7)
    rows.insert(3, {"prompt": "9" * 25, "answer": "9"})  # case 16: one token too long
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "set.parquet")
    held_out = [str(prompts / "heldout.jsonl"), str(write_jsonl(tmp_path / "other.jsonl", make_rows(5, seed=8)))]
    rewards = {"functions": ["mine.py:poison", "regex", "length_penalty"], "weights": [1.0, 1.0, 0.1],
               "timeout_s": 1.0, "num_workers": 2}
    config = write_config(
        tmp_path / "config.yaml", model, "", tmp_path / "run",
        data={"train": [str(prompts / "train.jsonl"), str(tmp_path / "set.parquet")], "weights": [0.75, 0.25],
              "eval": held_out}, rewards=rewards, metrics={"completions_steps": 1, "num_completions": 4})
    command = ["-m", "spmd_rl.train", "--config", str(config), "--profile", "2"]
    finished = torchrun(2, command, cwd=tmp_path).succeeded()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first, steps = lines[0], [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert finished.output.count("set.parquet: 1 rows dropped, longer than data.max_prompt_length 24: rows 3") == 1
    assert [line["epoch"] for line in steps] == [4 / 84, 8 / 84]  # 64 rows and 20 are left, in steps of four all along
    failed = sum(line["rewards/poison/failed"] for line in lines if "rewards/poison/failed" in line)
    assert failed > 0 and "reward poison, row " in finished.output
    for line in steps:
        kinds = [value for name, value in line.items() if name.startswith("rewards/poison/failed_by_")]
        assert line["rewards/poison/failed"] == line["rewards/poison/unscored"] == sum(kinds)
        assert line["rewards/regex/failed"] == 0
        assert {"timing/rollout_lag", "timing/slowest_rank", "memory/process_gib"} <= line.keys()
    samples = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [1] * 4 + [2] * 4
    assert sorted(path.name for path in (tmp_path / "run" / "profile").iterdir()) == [
        "step-2-rank-0.json.gz", "step-2-rank-1.json.gz"]
    alone = tmp_path / "alone"
    launch(1, ["eval", "--config", str(tmp_path / "run" / "config.yaml"), "--run.output_dir", str(alone)],
           cwd=tmp_path).succeeded()
    found = json.loads((alone / "eval.json").read_text())
    compared = [name for name in first if name.startswith("eval/")]
    assert {name: first[name] for name in compared} == {name: found[name] for name in compared} and compared
    report.main([str(tmp_path / "run")])
    assert "Sample completions" in (tmp_path / "run" / "report.html").read_text()


# Log-probs. -----------------------------------------------------------------------------------------------------------

GIVEN = [{"prompt": "12+30=", "completion": "42", "note": "kept \ud800"}, {"prompt": "9", "completion": "1"},
         {"prompt": [{"role": "user", "content": "2+2="}], "completion": "4é"},
         {"prompt_ids": [18, 19], "completion_ids": [20, 257]}, {"prompt": "a" * 20, "completion": "b" * 30}]


@pytest.fixture(scope="module")
def scored(model, tmp_path_factory):
    """A function from (ranks, ZeRO stage) to the rows that come out."""
    base = tmp_path_factory.mktemp("logprobs")
    given = base / "in.jsonl"  # case 19: a byte-order mark, Windows line ends, blank lines, no last line end
    given.write_bytes("\r\n \r\n".join(map(json.dumps, GIVEN)).encode("utf-8-sig"))

    def score(num_ranks, zero_stage):
        output = base / f"out-{num_ranks}-{zero_stage}.jsonl"
        launch(num_ranks, ["logprobs", "--input", str(given), "--output", str(output), "--model.path", str(model),
                           "--model.dtype", "float32", "--mesh.device", "cpu", "--policy.zero_stage", str(zero_stage),
                           "--rollout.temperature", str(TEMPERATURE), "--batch.max_tokens_per_microbatch", "40"]
               ).succeeded()
        return [json.loads(line) for line in output.read_text().splitlines()]

    return Once(score)


@pytest.mark.parametrize("num_ranks, zero_stage", [(1, 2), (2, 3), pytest.param(4, 2, marks=pytest.mark.long)])
def test_logprobs_are_those_of_transformers(scored, model, num_ranks, zero_stage):
    """log softmax(logits / T) in float64 at each completion token, in the order of the file; other columns are kept."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    found = scored(num_ranks, zero_stage)
    assert len(found) == len(GIVEN) and found[0]["note"] == GIVEN[0]["note"]
    for row, given in zip(found, GIVEN, strict=True):
        text = given.get("prompt")
        if isinstance(text, list):
            text = tokenizer.apply_chat_template(text, tokenize=False, add_generation_prompt=True)
        prompt = given.get("prompt_ids") or tokenizer(text)["input_ids"]
        ids = given.get("completion_ids") or tokenizer(given["completion"])["input_ids"]
        with torch.no_grad():
            logits = net(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1:-1] / TEMPERATURE
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()
        assert row["completion_ids"] == ids
        assert row["logprobs"] == pytest.approx(expected, abs=2e-5)
        assert row["logprob"] == pytest.approx(sum(expected), abs=2e-4)


BAD = {
    "no completion": ({"prompt": "a"}, "completion_ids is None"),
    "an empty completion": ({"prompt": "a", "completion": ""}, r"completion_ids is \[\]"),
    "an id that is none": ({"prompt_ids": [1], "completion_ids": [320]}, "token ids below 320"),
    "no prompt": ({"completion": "a"}, "no `prompt`"),
    "a word for ids": ({"prompt_ids": "a", "completion": "a"}, "prompt_ids is 'a'"),
    "a completion that is no Unicode": ({"prompt": "a", "completion": "b\ud800"}, "the completion is no valid Unicode"),
    "case 16, too long": ({"prompt": "a", "completion_ids": [1] * 40000}, r"1 \+ 40000 tokens; the model takes 32768"),
    "case 18, a forged turn": ({"prompt": [{"role": "user", "content": "a<|endoftext|>"}], "completion": "b"},
                               r"a message holds '<\|endoftext\|>'"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_row_that_cannot_be_scored_is_refused(model, tmp_path, kind, capsys):
    """Exit 2 with file, line and reason, before anything is loaded, and no output."""
    from spmd_rl.inference import main_logprobs

    row, message = BAD[kind]
    given = write_jsonl(tmp_path / "in.jsonl", [GIVEN[0], row])
    with pytest.raises(SystemExit) as exit_:
        main_logprobs(["--input", str(given), "--output", str(tmp_path / "out.jsonl"), "--model.path", str(model)])
    assert exit_.value.code == 2
    output = capsys.readouterr().err
    assert "in.jsonl, line 2: " in output
    assert re.search(message, output), output
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("arguments, message", [
    (["logprobs", "--output", "x"], "--input is not given"),
    (["logprobs", "--input", "/dev/null", "--output", "x", "--model.path", "{model}"], "--input is '/dev/null'"),
    (["logprobs", "--input", "{empty}", "--output", "x", "--model.path", "{model}"], "empty.jsonl: no rows"),
    (["logprobs", "--input", "no-file", "--output", "x", "--model.path", "{model}"], "no-file"),
    (["eval", "--model.path", "{model}"], "data.eval is not set"), (["eval", "--data.eval", "x.jsonl"], "model.path"),
    (["eval", "--model.path", "{model}", "--data.eval", "nowhere.jsonl"], "data.eval is 'nowhere.jsonl'"),
    (["logprobs", "--input", "{empty}", "--output", "x", "--model.path", "{model}",
      "--deepspeed.zero_optimization.zero_hpz_partition_size", "2"], "must divide the number of ranks, 1"),
    (["eval", "--model.path", "{model}", "--data.eval", "{rows}", "--mesh.device", "cpu", "--rewards.functions",
      "[regex]", "--rewards.regex_pattern", "1", "--data.max_prompt_length", "24", "--vllm.enable_chunked_prefill",
      "true"],
     "vllm.enable_chunked_prefill is True: on a CPU the engine has to read prompts whole")])
def test_what_is_missing_is_named(model, tmp_path, capsys, arguments, message):
    """Exit 2 with one line."""
    from spmd_rl.cli import main

    (tmp_path / "empty.jsonl").write_text("\ufeff\r\n  \n")
    places = {"{model}": str(model), "{empty}": str(tmp_path / "empty.jsonl"),
              "{rows}": str(write_jsonl(tmp_path / "rows.jsonl", make_rows(3, seed=1)))}
    with pytest.raises(SystemExit) as exit_:
        main([places.get(argument, argument) for argument in arguments])
    assert exit_.value.code == 2
    output = capsys.readouterr().err
    assert message in output and output.startswith("error: ") and output.count("\n") == 1
