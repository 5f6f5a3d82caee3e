"""What is done with a saved model without training it: ``spmd-rl eval`` and ``spmd-rl logprobs``.

Both take the options of a run (--config, --model.path, ...) and run on any number of ranks:
``torchrun --nproc_per_node N -m spmd_rl.cli eval ...``.
"""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from spmd_rl import checks
from spmd_rl.batch import Completion, pack, plan_step
from spmd_rl.config import Config, ConfigError, parse
from spmd_rl.evaluate import evaluate
from spmd_rl.files import WRITING
from spmd_rl.job import left_out, load_eval_prompts
from spmd_rl.mesh import Mesh, Ranks, check_device, say_error, say_once
from spmd_rl.metrics import Metrics, as_samples
from spmd_rl.model import load_hf_config, weight_files
from spmd_rl.policy import Reference
from spmd_rl.prompts import encode_prompt, load_tokenizer
from spmd_rl.rewards import Rewards
from spmd_rl.rollout import Rollout
from spmd_rl.rows import JsonLines, prompt_and_columns
from spmd_rl.step import SamplingParts
from spmd_rl.watchdog import leave

EXIT_USAGE = 2
ROWS_AT_ONCE = 1024


def main_eval(args: list[str] | None = None) -> None:
    """Evaluate model.path on data.eval: metrics to stdout and RUN/eval.json, completions to RUN/eval_samples.jsonl."""
    def start() -> Callable[[], None]:
        config, _ = parse(args, prog="spmd-rl eval")
        checks.validate_saved(config, Ranks.from_environment().world_size)
        if not config.eval_sets:
            raise ConfigError("data.eval is not set: name the held-out set to evaluate on")
        weight_files(config.model.path)
        tokenizer = load_tokenizer(config.model)
        rewards = Rewards(config.rewards, config.rollout.max_completion_length)
        sets = load_eval_prompts(config, tokenizer, rewards)
        for prompts in sets.values():
            for line in left_out(prompts, config.data.max_prompt_length):
                say_once(line)
        if check_device(config.mesh).type == "cpu":
            checks.check_cpu_engine(config)
        rewards.start()
        return lambda: _in_ranks(config, lambda mesh: _evaluate(config, mesh, tokenizer, rewards, sets))

    _run(start)


def _evaluate(config: Config, mesh: Mesh, tokenizer: Any, rewards: Rewards, sets: dict) -> None:
    folder = config.run.output_dir
    for path in mesh.on_main(lambda: [folder]):
        os.makedirs(path, mode=0o700, exist_ok=True)
    files = mesh.on_main(lambda: [open(os.path.join(folder, "eval_samples.jsonl"), "w", encoding="utf-8")])

    def write(name: str, completions: list[Completion]) -> None:
        for file in files:
            for sample in as_samples(completions, tokenizer, rewards.names):
                file.write(json.dumps({"set": name, **sample}) + "\n")

    rollout = Rollout(config, mesh, tokenizer, sleeps=False, reads_weights=True)
    found = evaluate(SamplingParts(config, mesh, Metrics(mesh, []), rewards, rollout), sets, write)
    for file in files:
        file.close()
    for path in mesh.on_main(lambda: [os.path.join(folder, "eval.json")]):
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"model": config.model.path, **found}, file, indent=1)
        print(json.dumps(found), flush=True)
    rewards.close()
    mesh.leave_together()
    rollout.close()
    mesh.close()


def main_logprobs(args: list[str] | None = None) -> None:
    """Log-probs of given completions under model.path, JSONL in and out.

    A row has `prompt` and `completion` (text; encoded as it is, without an end of sequence), or `prompt_ids` and
    `completion_ids`; it comes out with `completion_ids`, `logprobs` (one a token, at rollout.temperature) and
    `logprob`, their sum.
    """
    parser = argparse.ArgumentParser(prog="spmd-rl logprobs", allow_abbrev=False, add_help=False)
    parser.add_argument("--input", help="JSONL file with a completion a row")
    parser.add_argument("--output", help="JSONL file to write")
    parser.add_argument("-h", "--help", action="store_true")
    own, rest = parser.parse_known_args(sys.argv[1:] if args is None else args)

    def start() -> Callable[[], None]:
        if own.help:
            parser.print_help()
            print("and the options of a run, of which model, mesh, policy.zero_stage, rollout.temperature and\n"
                  "batch.max_tokens_per_microbatch count: see spmd-rl train --help")
            sys.exit(0)
        for name in ("input", "output"):
            if getattr(own, name) is None:
                raise ConfigError(f"--{name} is not given: name a JSONL file")
        config, _ = parse(rest, prog="spmd-rl logprobs")
        world_size = Ranks.from_environment().world_size
        checks.validate_saved(config, world_size)
        checks.check_second_shards(config, world_size)
        if not os.path.isfile(own.input):
            raise ConfigError(f"--input is {own.input!r}: no such file")
        weight_files(config.model.path)
        tokenizer = load_tokenizer(config.model)
        hf_config = load_hf_config(config.model)
        # A bad row ends the command before anything is loaded.
        if not sum(1 for _ in _sequences(own.input, tokenizer, config, hf_config)):
            raise ConfigError(f"{own.input}: no rows")
        check_device(config.mesh)
        return lambda: _in_ranks(config, lambda mesh: _score(
            config, mesh, hf_config, _sequences(own.input, tokenizer, config, hf_config), own.output))

    _run(start)


def _sequences(path: str, tokenizer: Any, config: Config,
               hf_config: Any) -> Iterator[tuple[dict[str, Any], Completion]]:
    """(row, its sequence) in order. Raises ConfigError with file, line and reason."""
    source = JsonLines(path)
    longest = getattr(hf_config, "max_position_embeddings", None) or sys.maxsize
    for number, (_, where, raw, _) in enumerate(source.scan()):
        row = source.parse(raw, where)
        if "prompt_ids" in row:
            prompt_ids = row["prompt_ids"]
        else:
            content, _ = prompt_and_columns(row, config.data, where)
            prompt_ids = encode_prompt(tokenizer, content, config.data.system_prompt, where,
                                       config.data.chat_template_kwargs)
        token_ids: Any = row.get("completion_ids")
        if token_ids is None and isinstance(row.get("completion"), str):
            try:
                row["completion"].encode()
            except UnicodeEncodeError as error:
                raise ConfigError(f"{where}: the completion is no valid Unicode: {error}") from None
            token_ids = tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
        for name, ids in (("prompt_ids", prompt_ids), ("completion_ids", token_ids)):
            if not (isinstance(ids, list) and ids and all(
                    type(i) is int and 0 <= i < hf_config.vocab_size for i in ids)):
                raise ConfigError(f"{where}: {name} is {ids!r:.80}: give `prompt` and `completion` as text, or lists "
                                  f"of token ids below {hf_config.vocab_size}, none of them empty")
        if len(prompt_ids) + len(token_ids) > longest:
            raise ConfigError(f"{where}: {len(prompt_ids)} + {len(token_ids)} tokens; the model takes {longest}")
        yield row, Completion(number, 0, prompt_ids, token_ids, [0.0] * len(token_ids), "stop", 0)


def _score(config: Config, mesh: Mesh, hf_config: Any, sequences: Iterator[tuple[dict[str, Any], Completion]],
           output: str) -> None:
    model = Reference(config, mesh, hf_config)
    os.makedirs(os.path.dirname(os.path.abspath(output)), exist_ok=True)
    files = mesh.on_main(lambda: [open(output + WRITING, "w", encoding="utf-8")])
    count = 0
    while chunk := list(itertools.islice(sequences, ROWS_AT_ONCE)):  # every rank reads the same file
        logprobs = _logprobs([completion for _, completion in chunk], model, mesh, config)
        for file in files:
            for row, completion in chunk:
                found = logprobs[completion.group]
                # In ASCII: whatever text is in another column survives, lone surrogates too.
                file.write(json.dumps({**row, "completion_ids": completion.token_ids, "logprobs": found,
                                       "logprob": sum(found)}) + "\n")
        count += len(chunk)
    for file in files:
        file.close()
        os.replace(output + WRITING, output)
    say_once(f"{output}: {count} rows")
    mesh.leave_together()
    model.close()
    mesh.close()


def _logprobs(completions: Sequence[Completion], model: Reference, mesh: Mesh,
              config: Config) -> dict[int, list[float]]:
    """Group -> one log-prob a token, of all ranks. Collective."""
    plan = plan_step(completions, mesh.world_size, config.batch.max_tokens_per_microbatch)
    rows = [pack(row, mesh.device, model.row_block) for row in mesh.mine(plan)]
    mine = {}
    for mb, (logprobs_N, _) in zip(rows, model.score(rows), strict=True):
        values = iter(logprobs_N.tolist())
        for completion in mb.completions:
            mine[completion.group] = [next(values) for _ in completion.token_ids]
    return {group: values for part in mesh.all_gather(mine) for group, values in part.items()}


def _run(start: Callable[[], Callable[[], None]]) -> None:
    """Start and run; a mistake of the user's is one line and exit code 2."""
    try:
        work = start()
        work()
    except ConfigError as error:
        say_error(str(error))
        sys.exit(EXIT_USAGE)


def _in_ranks(config: Config, work: Callable[[Mesh], None]) -> None:
    mesh = Mesh(config.mesh, config.rollout.tensor_parallel_size, config.run.seed)
    try:
        work(mesh)
    except ConfigError:
        raise
    except BaseException as error:
        mesh.fail(error)
    leave(0)  # all is closed; the interpreter's tear-down now and then meets a thread of torch's and aborts
