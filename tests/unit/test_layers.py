"""Compiled element-wise layers give what the plain ones give, with one compilation for rows of every size."""

import sys

import pytest
import torch

from spmd_rl import layers
from spmd_rl.attention import num_compilations
from spmd_rl.batch import pack
from spmd_rl.config import ModelConfig
from spmd_rl.model import build, load_hf_config

FAMILIES = ["qwen3", "qwen2", "llama", "gemma3"]


@pytest.fixture
def plain_compiler(monkeypatch):
    """No code generation: what is compared is what was captured, and how often."""
    monkeypatch.setattr(layers, "BACKEND", "aot_eager")
    layers._compiled.cache_clear()
    torch._dynamo.reset()
    yield
    layers._compiled.cache_clear()


def restored_rotary(model):
    """The architecture's own function again: the replaced one serves every model of this process."""
    names = vars(sys.modules[type(model.lm).__module__])
    assert isinstance(names["apply_rotary_pos_emb"], layers.functools.partial)
    names["apply_rotary_pos_emb"] = names["apply_rotary_pos_emb"].args[0]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_plain_layers(plain_compiler, model_folder, completion, close, family, checkpointing):
    """Log-probs and every gradient to 1e-6, and no compilation after the first row and a second one of another size."""
    config = ModelConfig(path=model_folder(family), dtype="float32")
    found = []
    counts = []
    for is_compiled in (False, True):
        model = build(config, load_hf_config(config), 1.0).train()
        if is_compiled:
            layers.compile_layers(model.lm)
        if checkpointing:
            model.lm.gradient_checkpointing_enable({"use_reentrant": False})
        for size in (20, 33, 50, 7):
            mb = pack([completion([5 + i for i in range(size)], prompt_ids=[1, 2, 3])], torch.device("cpu"))
            logprobs, _ = model(mb.input_ids_S, mb.positions_S, mb.segments_3S, mb.target_index_N, mb.target_ids_N, 1.0)
            logprobs.sum().backward()
            counts.append(num_compilations())
            found.append(logprobs.detach())
        found += [p.grad for p in model.parameters()]
    restored_rotary(model)
    half = len(found) // 2
    for got, want in zip(found[half:], found[:half], strict=True):
        close(got, want, 1e-6)
    assert counts[4] > counts[3]  # the compiled model's first row
    assert counts[7] == counts[4]
