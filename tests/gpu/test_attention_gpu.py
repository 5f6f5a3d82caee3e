"""Packed rows and the log-prob head on CUDA, against plain computation of the same sequences."""

import pytest
import torch

from spmd_rl.attention import PackedSegments
from spmd_rl.batch import Completion, pack
from spmd_rl.logprobs import LogprobHead

pytestmark = pytest.mark.gpu

# Relative size of bf16's rounding (8 bits of mantissa), over the few layers of these models.
BF16_TOLERANCE = 0.05


def completions(vocab_size: int) -> list[Completion]:
    draw = torch.Generator().manual_seed(0)
    lengths = [(5, 3), (90, 200), (1, 1), (33, 64)]
    ids = [torch.randint(vocab_size, (p + c,), generator=draw).tolist() for p, c in lengths]
    return [Completion(g, 0, row[:p], row[p:], [0.0] * c, "stop", 0)
            for g, (row, (p, c)) in enumerate(zip(ids, lengths, strict=True))]


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "gemma3"])
def test_packed_rows_equal_single_rows(family, make_model):
    """A sequence's log-probs are those it has alone: FlexAttention lets no segment see another, sliding windows
    included (gemma3's of 32 tokens is shorter than the sequences here)."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from spmd_rl import attention
    from spmd_rl.model import LogprobModel

    sizes = make_model.TINY | dict(head_dim=64, num_heads=2, num_kv_heads=1, dtype=torch.float32)
    lm = make_model.build_model(family, **sizes).cuda()
    sequences = completions(sizes["vocab_size"])
    with torch.no_grad():
        alone = []
        for c in sequences:
            logits = lm(torch.tensor([c.prompt_ids + c.token_ids]).cuda()).logits[0].double()
            first = len(c.prompt_ids) - 1
            scores = logits[first:-1].log_softmax(-1)
            alone.append(scores.gather(-1, torch.tensor(c.token_ids).cuda()[:, None])[:, 0])
        ALL_ATTENTION_FUNCTIONS.register(attention.NAME, attention.packed_attention)
        lm.set_attn_implementation(attention.NAME)
        mb = pack(sequences, torch.device("cuda"), block=128)
        packed, _ = LogprobModel(lm, 0.01)(mb.input_ids_S, mb.positions_S, mb.segment_ids_S, mb.target_index_N,
                                           mb.target_ids_N, 1.0)
    # TF32 is off by default; the kernels sum in another order.
    assert (packed.double() - torch.cat(alone)).abs().max() < 2e-3


def test_block_mask_hides_other_segments():
    """The mask holds exactly: own segment, earlier or same place."""
    segments = torch.tensor([0] * 100 + [1] * 60 + [-1] * 96, device="cuda")
    mask = PackedSegments(segments).block_mask(None)
    place = torch.arange(segments.numel(), device="cuda")
    seen = mask.mask_mod(0, 0, place[:, None], place[None, :])
    wanted = (segments[:, None] == segments[None, :]) & (place[:, None] >= place[None, :])
    assert torch.equal(seen, wanted)


@pytest.mark.parametrize("memory_gib", [0.01, 2.0])
def test_logprob_head_in_bf16(memory_gib):
    """bf16 operands, fp32 results: values and gradients are those of float64 on the same bf16 numbers."""
    torch.manual_seed(0)
    hidden = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(5000, 256, device="cuda", dtype=torch.bfloat16) / 16)
    targets, grads = torch.randint(5000, (300,), device="cuda"), torch.randn(300, device="cuda")
    logprobs, _ = LogprobHead(weight, memory_gib)(hidden, targets, 0.6)
    (logprobs * grads).sum().backward()
    hidden64 = hidden.detach().double().requires_grad_()
    weight64 = weight.detach().double().requires_grad_()
    wanted = (hidden64 @ weight64.T / 0.6).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    (wanted * grads.double()).sum().backward()
    assert (logprobs - wanted).abs().max() < 1e-4
    for got, right in ((hidden.grad, hidden64.grad), (weight.grad, weight64.grad)):
        assert (got.double() - right).abs().max() <= BF16_TOLERANCE * right.abs().max()
