"""Operations by arithmetic against counting one by one, and against torch's own counter on a real model."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from spmd_rl.flops import Flops, ModelShape, peak_tflops, seen_pairs
from spmd_rl.model import shape

SMALL = ModelShape(linear_parameters=10, last_parameters=2, windows=(None, 4), query_width=3, vocabulary=7, hidden=1)


@pytest.mark.parametrize("window", [None, 1, 4, 9, 100])
@pytest.mark.parametrize("length", [0, 1, 5, 12])
@pytest.mark.parametrize("prompt_length", [0, 1, 3, 8])
def test_pairs_are_counted(prompt_length, length, window):
    """Each token with those it sees: itself, and at most window - 1 before it."""
    positions = range(prompt_length, prompt_length + length)
    counted = sum(min(position + 1, window or position + 1) for position in positions)
    assert seen_pairs(prompt_length, length, window) == counted


def test_a_group_by_hand():
    """Prompt 3, completions 2 and 1. Linear 2 * 10 * 6; head 2 * 7 * 3; pairs without window 6 + (4 + 5) + 4 = 19, with
    a window of 4: 6 + (4 + 4) + 4 = 18; 4 * 3 * 37. Copies compute the prompt twice."""
    assert SMALL.of(3, [2, 1]) == Flops(120, 42, 444, 24)
    assert SMALL.of_copies(3, [2, 1]) == Flops(180, 42, 444 + 12 * 12, 36)
    assert SMALL.of(3, []) == Flops(60, 0, 144, 12)
    assert SMALL.of_copies(3, []) == Flops()
    assert ModelShape().of(3, [2, 1]) == Flops(linear=12)


def test_passes_by_hand():
    """Linear layers: forward, again where recomputed, and two products backward; attention's backward has five for
    the forward's two; the head's has its logits again. A block's last product is not done again. Useful: three
    forwards."""
    flops = Flops(100, 10, 20)
    assert Flops(100, 10, 20, 30).training(recomputed=0.5) == 350 - 15 + 80 + 40
    assert flops.forward == 130 and flops.useful == 390
    assert flops.training(recomputed=1) == 400 + 90 + 40
    assert flops.training(recomputed=0) == 300 + 70 + 40
    assert flops.training(recomputed=0.5) == 350 + 80 + 40


# (prompt, completion, G) -> the most that sharing can give for Qwen3-1.7B, forward and backward.
@pytest.mark.parametrize("prompt, completion, size, ceiling", [
    (512, 1024, 8, 1.32), (2048, 2048, 8, 1.58), (8192, 1024, 8, 3.81), (8192, 1024, 16, 4.77), (16384, 1024, 8, 4.89)])
def test_ceilings_of_1_7b(prompt, completion, size, ceiling):
    """The arithmetic of copies over that of a shared prompt."""
    large = ModelShape(28 * 50_331_648, 28 * 6144 * 2048, (None,) * 28, 2048, vocabulary=151936, hidden=2048)
    lengths = [completion] * size
    ratio = large.of_copies(prompt, lengths).training(1) / large.of(prompt, lengths).training(1)
    assert ratio == pytest.approx(ceiling, abs=0.006)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "gemma3"])
def test_shape_is_the_models(model_folder, family, tied):
    """Linear layers and head of a real forward, as torch counts them: 2 operations an entry and token."""
    model = AutoModelForCausalLM.from_pretrained(model_folder(family, tied=tied), dtype=torch.float32)
    found, length = shape(model), 40
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.long))
    counted = counter.get_flop_counts()["Global"]
    products = sum(counted[op] for op in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm) if op in counted)
    wanted = 2 * (found.linear_parameters + found.head_parameters) * length
    assert wanted == pytest.approx(products, rel=0.01)  # rotary angles are a product too
    assert found.query_width == 4 * 8
    assert found.windows == ((32, None) if family == "gemma3" else (None, None))
    assert (found.vocabulary, found.hidden) == tuple(model.lm_head.weight.shape)
    assert (found.key_width, found.intermediate) == (model.model.layers[0].self_attn.k_proj.out_features,
                                                     model.model.layers[0].mlp.up_proj.out_features)
    counts = [p.numel() for p in model.parameters()]  # a tied one once
    assert (found.num_parameters, found.largest_parameter) == (sum(counts), max(counts))


@pytest.mark.parametrize("name, peak", [("NVIDIA H200", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 80GB HBM3", 989),
                                        ("NVIDIA A100-SXM4-80GB", 312), ("Some CPU", 0)])
def test_peaks_are_the_data_sheets(name, peak):
    """By the name that the driver gives; unknown is 0."""
    assert peak_tflops(name) == peak


# Families that were not made for this: fused projections, other names, norms after the MLP.
@pytest.mark.parametrize("model_type", ["phi3", "olmo2", "starcoder2", "stablelm", "gpt_neox", "smollm3"])
def test_shape_of_other_architectures(model_type):
    """Products of a real forward are those of the shape, to 1 %."""
    config = AutoConfig.for_model(
        model_type, vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=48, max_position_embeddings=64, pad_token_id=0, bos_token_id=0, eos_token_id=0)
    model, length = AutoModelForCausalLM.from_config(config), 40
    found = shape(model)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.long))
    counted = counter.get_flop_counts()["Global"]
    products = sum(counted.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm))
    assert 2 * (found.linear_parameters + found.head_parameters) * length == pytest.approx(products, rel=0.01)
    assert found.query_width == 32 and found.windows in ((None,) * 2, (config.to_dict().get("sliding_window"),) * 2)
