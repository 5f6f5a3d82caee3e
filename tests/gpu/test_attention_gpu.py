"""Packed rows and the log-prob head on CUDA, against plain computation of the same sequences."""

import sys

import pytest
import torch
from packed import packed_model

from spmd_rl import attention, layers
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


def groups(vocab_size: int, size: int = 700) -> list[list[Completion]]:
    """Two groups; the first takes `size` tokens."""
    draw = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(vocab_size, (count,), generator=draw).tolist()

    made = []
    for number, (prompt, lengths) in enumerate([(size - 70, [40, 1, 29]), (200, [130, 7])]):
        ids = tokens(prompt)
        made.append([Completion(number, i, ids, tokens(n), [0.0] * n, "stop", 0) for i, n in enumerate(lengths)])
    return made


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "gemma3"])
def test_packed_rows_equal_single_rows(family, make_model):
    """A sequence's log-probs are those it has alone: FlexAttention lets no segment see another, sliding windows
    included (gemma3's of 32 tokens is shorter than the sequences here)."""
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
        mb = pack(sequences, torch.device("cuda"), block=128)
        packed, _ = packed_model(lm)(mb.input_ids_S, mb.positions_S, mb.segments_3S, mb.target_index_N,
                                     mb.target_ids_N, 1.0)
    # TF32 is off by default; the kernels sum in another order.
    assert (packed.double() - torch.cat(alone)).abs().max() < 2e-3


def test_block_mask_is_that_of_the_cpu():
    """The same blocks, absent, partial and full, as on a CPU, where they are compared with the dense mask."""
    rows = [[groups(320)[0], *completions(320)], completions(320)]
    for row in rows:
        masks = [PackedSegments(pack(row, torch.device(device)).segments_3S, [1024]).block_mask(100)
                 for device in ("cuda", "cpu")]
        for got, want in zip(*(mask.as_tuple() for mask in masks)):
            assert not isinstance(want, torch.Tensor) or torch.equal(got.cpu(), want)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "gemma3"])
def test_shared_prompts_equal_copies(family, make_model):
    """Log-probs and every gradient of rows with shared prompts are those of packed copies, in fp32 (TF32 is off)."""
    sizes = make_model.TINY | dict(head_dim=64, num_heads=2, num_kv_heads=1, dtype=torch.float32)
    unshared = [c for group in groups(sizes["vocab_size"]) for c in group]
    found = []
    for row in (groups(sizes["vocab_size"]), unshared):
        model = packed_model(make_model.build_model(family, **sizes).cuda())
        model.row_lengths = [2048]
        mb = pack(row, torch.device("cuda"), block=128)
        logprobs, _ = model(mb.input_ids_S, mb.positions_S, mb.segments_3S, mb.target_index_N, mb.target_ids_N, 1.0)
        weights = torch.linspace(-1, 1, logprobs.numel(), device="cuda") / 100
        (logprobs * weights).sum().backward()
        found.append((logprobs.detach(), [p.grad for p in model.parameters()]))
    (shared, shared_grads), (copies, grads) = found
    assert (shared - copies).abs().max() < 2e-3
    for got, want in zip(shared_grads, grads, strict=True):
        assert (got - want).abs().max() <= 2e-3 * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("compiles_layers", [False, True])
def test_nothing_compiles_after_warm_up(make_model, monkeypatch, compiles_layers):
    """Rows of many sizes, forward and backward and forward alone, take two lengths, both compiled with the first, and
    layers that are compiled once for all."""
    sizes = make_model.TINY | dict(head_dim=64, num_heads=2, num_kv_heads=1, dtype=torch.bfloat16)
    model = packed_model(make_model.build_model("qwen3", **sizes).cuda())
    if compiles_layers:
        names = sys.modules[type(model.lm).__module__]
        monkeypatch.setattr(names, "apply_rotary_pos_emb", names.apply_rotary_pos_emb)  # it is put back
        layers.compile_layers(model.lm)
    model.row_lengths = [512, 1024]
    model.train().lm.gradient_checkpointing_enable({"use_reentrant": False})
    compiled = []
    for size in (400, 1000, 90, 333, 512, 777, 1024, 129):
        mb = pack([[completion for completion in groups(320, size)[0]]], torch.device("cuda"), block=128)
        arguments = mb.input_ids_S, mb.positions_S, mb.segments_3S, mb.target_index_N, mb.target_ids_N, 1.0
        model(*arguments)[0].sum().backward()
        with torch.no_grad():
            model(*arguments)
        compiled.append(attention.num_compilations())
    assert compiled[0] > 0 and compiled[0] == compiled[-1]


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


def test_case_79_the_head_takes_less_than_a_copy_of_the_logits():
    """4096 tokens x 151,936 words in bf16, forward and backward: below one fp32 copy (2.32 GiB) beyond the weight's
    gradient, and log-probs of the direct fp32 computation."""
    torch.manual_seed(0)
    n, v, h = 4096, 151936, 1024
    hidden = torch.randn(n, h, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(v, h, device="cuda", dtype=torch.bfloat16) / 32)
    targets = torch.randint(v, (n,), device="cuda")
    head = LogprobHead(weight, 1.0)
    head(hidden, targets, 0.7)[0].sum().backward()  # compiles
    weight.grad = hidden.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs, _ = head(hidden, targets, 0.7)
    logprobs.sum().backward()
    extra = torch.cuda.max_memory_allocated() - before - weight.grad.nbytes
    assert extra < n * v * 4, f"{extra / 2**30:.2f} GiB"
    with torch.no_grad():
        for part in (slice(0, 256), slice(3840, 4096)):
            logits = torch.mm(hidden[part], weight.T, out_dtype=torch.float32) / 0.7
            direct = logits.log_softmax(-1).gather(-1, targets[part, None])[:, 0]
            assert (logprobs[part] - direct).abs().max() <= 1e-5 * direct.abs().max()
