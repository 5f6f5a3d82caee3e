"""Export: a Hugging Face folder of the policy's weights, of a run that is alive or of a checkpoint.

    spmd-rl export RUN-OR-CHECKPOINT [--output FOLDER] [--model FOLDER]

Written under another name, synced to disk, then renamed: a folder with the final name is whole.
"""

import argparse
import json
import os
import shutil
import sys
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig

from spmd_rl import run_folder
from spmd_rl.config import Config, ConfigError, ModelConfig
from spmd_rl.files import WRITING, replace_folder
from spmd_rl.mesh import Mesh
from spmd_rl.model import DTYPES, load_hf_config
from spmd_rl.policy import MASTER, Policy
from spmd_rl.prompts import load_tokenizer
from spmd_rl.shards import Shards


def main(args: list[str] | None = None) -> None:
    """Export a checkpoint, or a run's newest whole one; one process, no GPU. Exits with 2 where that cannot be."""
    parser = argparse.ArgumentParser(prog="spmd-rl export",
                                     description="Write a Hugging Face folder from a resumable checkpoint.")
    parser.add_argument("source", metavar="RUN-OR-CHECKPOINT", help="folder of a run (its newest whole checkpoint), or "
                        "of a checkpoint")
    parser.add_argument("--output", metavar="FOLDER", help="a new folder; RUN/export-N if absent")
    parser.add_argument("--model", metavar="FOLDER", help="where the starting model is now, for its config and "
                        "tokenizer")
    given = parser.parse_args(args)
    try:
        print(export_checkpoint(given.source, given.output, given.model))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def export_checkpoint(source: str, output: str | None = None, model_path: str | None = None) -> str:
    """Export a checkpoint's weights; returns the folder. One process reads what any ranks and ZeRO stage wrote, a
    parameter at a time.

    model_path: the starting model's folder where it is no longer at model.path. Raises ConfigError.
    """
    path = run_folder.newest_whole(source)
    state = run_folder.read_state(path)
    folder = output or os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(path))), f"export-{state['step']}")
    if os.path.exists(folder):
        raise ConfigError(f"{folder} is there already: give another one with --output, or remove it")
    saved = state["config"]["model"]
    model = ModelConfig(**(saved | ({"path": model_path} if model_path else {})))
    hf_config, tokenizer = load_hf_config(model), load_tokenizer(model)
    hf_config.dtype = DTYPES[model.dtype]
    writer = ShardWriter(folder + WRITING, _shard_bytes(state["config"]["checkpoint"]["max_shard_gib"]))
    with Shards(os.path.join(path, run_folder.POLICY)) as shards:
        for name in shards.shapes:
            writer.add(name, shards.whole(MASTER, name).to(hf_config.dtype))
    _finish(folder, writer, hf_config, tokenizer, model)
    return folder


def export(folder: str, policy: Policy, tokenizer: Any, config: Config, mesh: Mesh) -> None:
    """Write weights (safetensors, tied ones once, in the policy's type), config, generation config and tokenizer.

    Collective: weights are gathered by bucket, and one rank writes. An older folder of the name is
    replaced once the new one is whole.
    """
    writers = mesh.on_main(lambda: [ShardWriter(folder + WRITING, _shard_bytes(config.checkpoint.max_shard_gib))])
    for name, tensor in policy.full_weights(config.weight_sync.bucket_mib * 2**20):
        for writer in writers:
            writer.add(name, tensor)
    for writer in writers:
        _finish(folder, writer, policy.hf_config, tokenizer, config.model)
    mesh.barrier()  # the folder is there for every rank that returns


def _shard_bytes(gib: float) -> int:
    return int(gib * 2**30)


def _finish(folder: str, writer: "ShardWriter", hf_config: Any, tokenizer: Any, model: ModelConfig) -> None:
    """Put the rest beside the weights, and give the folder its name."""
    writer.finish()
    hf_config.save_pretrained(folder + WRITING)
    tokenizer.save_pretrained(folder + WRITING)
    _write_generation_config(model, hf_config, folder + WRITING)
    replace_folder(folder)


class ShardWriter:
    """Collects tensors into safetensors files of a bounded size: no more than one file's tensors are on the host."""

    def __init__(self, folder: str, max_bytes: int) -> None:
        shutil.rmtree(folder, ignore_errors=True)  # left by an export that was cut off; only we write this name
        os.makedirs(folder)
        self._folder, self._max_bytes = folder, max_bytes
        self._shard: dict[str, Tensor] = {}
        self._shard_bytes = 0
        self._parts: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor to the host; a full file goes to disk."""
        size = tensor.numel() * tensor.element_size()
        if self._shard and self._shard_bytes + size > self._max_bytes:
            self._flush()
        self._shard[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        self._shard_bytes += size

    def finish(self) -> None:
        """Write the rest, give the files their final names, and the index where there are several."""
        self._flush()
        count = len(self._parts)
        names = ["model.safetensors"] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors"
                                                          for i in range(count)]
        for i, name in enumerate(names):
            os.rename(self._part(i), os.path.join(self._folder, name))
        if count > 1:
            weight_map = {tensor: name for name, tensors in zip(names, self._parts, strict=True) for tensor in tensors}
            with open(os.path.join(self._folder, "model.safetensors.index.json"), "w") as file:
                json.dump({"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}, file, indent=1)

    def _part(self, number: int) -> str:
        return os.path.join(self._folder, f"part-{number}")

    def _flush(self) -> None:
        save_file(self._shard, self._part(len(self._parts)), metadata={"format": "pt"})
        self._parts.append(list(self._shard))
        self._total_bytes += self._shard_bytes
        self._shard, self._shard_bytes = {}, 0


def _write_generation_config(model: ModelConfig, hf_config: Any, folder: str) -> None:
    """The source folder's as it is (Transformers refuses to write some that it reads), else one from the model's."""
    source = os.path.join(model.path, "generation_config.json")
    if os.path.exists(source):
        shutil.copyfile(source, os.path.join(folder, "generation_config.json"))
    else:
        GenerationConfig.from_model_config(hf_config).save_pretrained(folder)
