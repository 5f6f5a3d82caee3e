"""Compiled layers with their real kernels, against the plain ones of the same model."""

import sys

import pytest
import torch
from packed import packed_model

from spmd_rl import layers
from spmd_rl.batch import Completion, pack

pytestmark = pytest.mark.gpu
FAMILIES = ["qwen3", "qwen2", "llama", "gemma3"]


@pytest.fixture
def learned(make_model, monkeypatch):
    """(family, dtype, whether compiled) -> log-probs of rows of several sizes, gradients of their sum."""
    sizes = make_model.TINY | dict(head_dim=64, num_heads=2, num_kv_heads=1, dtype=torch.float32)
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(sizes["vocab_size"], (length,), generator=draw).tolist() for length in (200, 900, 130)]

    def learn(family, dtype, is_compiled):
        lm = make_model.build_model(family, **sizes).cuda().train()
        for parameter in lm.parameters():  # no buffers: rotary frequencies in bf16 are coarser than all the rest
            parameter.data = parameter.data.to(dtype)
        names = sys.modules[type(lm).__module__]
        monkeypatch.setattr(names, "apply_rotary_pos_emb", names.apply_rotary_pos_emb)
        if is_compiled:
            layers.compile_layers(lm)
        model = packed_model(lm)
        logprobs = []
        for ids in rows:
            completion = Completion(0, 0, ids[:20], ids[20:], [0.0] * (len(ids) - 20), "stop", 0)
            mb = pack([completion], torch.device("cuda"), block=128)
            of_row, _ = model(mb.input_ids_S, mb.positions_S, mb.segments_3S, mb.target_index_N, mb.target_ids_N, 1.0)
            of_row.sum().backward()
            logprobs.append(of_row.detach())
        monkeypatch.undo()
        return torch.cat(logprobs), [p.grad for p in lm.parameters()]

    return learn


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_plain_layers(learned, family):
    """fp32: log-probs to 1e-5, each gradient to 1e-5 of the norm of all."""
    plain, gradients = learned(family, torch.float32, False)
    compiled, found = learned(family, torch.float32, True)
    assert (compiled - plain).abs().max() < 1e-5
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    for got, want in zip(found, gradients, strict=True):
        assert (got - want).norm() <= 1e-5 * norm


@pytest.mark.parametrize("family", FAMILIES)
def test_rounding_is_no_coarser(learned, family):
    """bf16 against fp32: a kernel keeps in fp32 what plain operations round one after the other."""
    exact = learned(family, torch.float32, False)[0]
    plain, compiled = ((learned(family, torch.bfloat16, choice)[0] - exact).abs().mean() for choice in (False, True))
    assert 0 < compiled <= 1.1 * plain
