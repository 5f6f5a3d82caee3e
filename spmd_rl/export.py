"""Export: a Hugging Face folder of the policy's weights.

Written under another name, synced to disk, then renamed: a folder with the final name is whole.
"""

import json
import os
import shutil
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig

from spmd_rl.config import Config
from spmd_rl.files import WRITING, replace_folder
from spmd_rl.mesh import Mesh
from spmd_rl.policy import Policy


def export(folder: str, policy: Policy, tokenizer: Any, config: Config, mesh: Mesh) -> None:
    """Write weights (safetensors, tied ones once, in the policy's type), config, generation config and tokenizer.

    Collective: weights are gathered by bucket, and one rank writes. An older folder of the name is
    replaced once the new one is whole.
    """
    writers = mesh.on_main(lambda: [ShardWriter(folder + WRITING, int(config.checkpoint.max_shard_gib * 2**30))])
    for name, tensor in policy.full_weights(config.weight_sync.bucket_mib * 2**20):
        for writer in writers:
            writer.add(name, tensor)
    for writer in writers:
        writer.finish()
        policy.hf_config.save_pretrained(folder + WRITING)
        tokenizer.save_pretrained(folder + WRITING)
        _write_generation_config(config, policy.hf_config, folder + WRITING)
        replace_folder(folder)
    mesh.barrier()  # the folder is there for every rank that returns


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


def _write_generation_config(config: Config, hf_config: Any, folder: str) -> None:
    """The source folder's as it is (Transformers refuses to write some that it reads), else one from the model's."""
    source = os.path.join(config.model.path, "generation_config.json")
    if os.path.exists(source):
        shutil.copyfile(source, os.path.join(folder, "generation_config.json"))
    else:
        GenerationConfig.from_model_config(hf_config).save_pretrained(folder)
