"""Tiled log-probs against log_softmax and gather in float64: values and both gradients."""

import pytest
import torch

from spmd_rl import logprobs
from spmd_rl.attention import num_compilations
from spmd_rl.logprobs import BYTES_PER_LOGIT, LogprobHead, TiledLogprobs, _tiles

H, V = 12, 37
TOLERANCE = 1e-5  # fp32: log-probs, and gradients relative to their largest


def draw(n, dtype=torch.float32, scale=1.0, seed=0):
    """(hidden_NH, weight_VH, target_ids_N, gradient of the log-probs)."""
    g = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(n, H, generator=g) * scale).to(dtype)
    weight = torch.randn(V, H, generator=g).to(dtype)
    return hidden, weight, torch.randint(V, (n,), generator=g), torch.randn(n, generator=g)


def reference(hidden, weight, targets, temperature, grad, entropy_grad=None):
    """(logprobs, entropy, gradient by hidden, gradient by weight) in float64, all logits at once."""
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logprobs_NV = torch.log_softmax(hidden @ weight.T / temperature, -1)
    logprobs_N = logprobs_NV.gather(-1, targets[:, None])[:, 0]
    entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    entropy_grad = torch.zeros_like(grad) if entropy_grad is None else entropy_grad
    (logprobs_N * grad.double() + entropy_N * entropy_grad.double()).sum().backward()
    return logprobs_N.detach(), entropy_N.detach(), hidden.grad, weight.grad


def tiled(hidden, weight, targets, temperature, grad, max_logits, entropy_grad=None):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logprobs_N, entropy_N = TiledLogprobs.apply(hidden, weight, targets, temperature, max_logits)
    total = (logprobs_N * grad).sum()
    if entropy_grad is not None:  # else its gradient is None, which is the path without a bonus
        total = total + (entropy_N * entropy_grad).sum()
    total.backward()
    assert logprobs_N.dtype == entropy_N.dtype == torch.float32
    assert (hidden.grad.dtype, weight.grad.dtype) == (hidden.dtype, weight.dtype)
    return logprobs_N.detach(), entropy_N.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.5, 2.0])
@pytest.mark.parametrize("max_logits", [1, V, 3 * V, 16 * V, 1000 * V])
@pytest.mark.parametrize("n", [0, 1, 16, 17, 50])
def test_equals_float64_for_every_tile(close, n, max_logits, temperature):
    """No tile size changes values or gradients, also where it divides neither N nor V and where N is 0."""
    data = draw(n)
    expected = reference(*data[:3], temperature, data[3])
    found = tiled(*data[:3], temperature, data[3], max_logits)
    for a, b in zip(found, expected):
        close(a, b, TOLERANCE)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("max_logits", [3 * V, 1000 * V])
@pytest.mark.parametrize("n", [0, 17])
def test_the_entropy_has_a_gradient(close, n, max_logits, temperature):
    """d entropy / d logits = -p (log p + entropy) / T, together with the log-prob's: what an entropy bonus needs."""
    data = draw(n)
    entropy_grad = draw(n)[3].flip(0) * 2
    expected = reference(*data[:3], temperature, data[3], entropy_grad)
    for a, b in zip(tiled(*data[:3], temperature, data[3], max_logits, entropy_grad), expected):
        close(a, b, TOLERANCE)


@pytest.mark.parametrize("max_logits", [5 * V, 64 * V])
def test_bf16_operands_have_fp32_logits(close, max_logits):
    """bf16 hidden states and weights: log-probs and entropy to 1e-5 of the same operands in float64.

    Logits rounded to bf16 are off by 2^-9 of their size, 0.03 here. Gradients are returned in bf16 (half a
    spacing is 2^-9 = 0.002) of a bf16 logit gradient: 0.01 of the largest.
    """
    data = draw(40, torch.bfloat16, scale=2.0)
    expected = reference(*data[:3], 0.7, data[3])
    found = tiled(*data[:3], 0.7, data[3], max_logits)
    close(found[0], expected[0], TOLERANCE)
    close(found[1], expected[1], TOLERANCE)
    for a, b in zip(found[2:], expected[2:]):
        assert (a.double() - b).abs().max() <= 0.01 * b.abs().max()


@pytest.mark.parametrize("scale", [100.0, 1e4])
def test_large_logits_stay_finite(close, scale):
    """Logits of thousands neither overflow nor give NaN; errors stay at the spacing of the largest logit.

    An entropy written as normaliser less expected logit multiplies that spacing by the logits once more. Backward has
    the logits anew from products of other shapes, whose last bits differ.
    """
    data = draw(20, scale=scale)
    expected = reference(*data[:3], 1.0, data[3])
    found = tiled(*data[:3], 1.0, data[3], 7 * V)
    assert all(torch.isfinite(t).all() for t in found)
    close(found[0], expected[0], TOLERANCE)
    largest = float((data[0].double() @ data[1].double().T).abs().max())
    for place in (1, 2, 3):
        close(found[place], expected[place], 4e-7 * largest)


# logits [2, 1, 0, -1]: ln(1 + e^-1 + e^-2 + e^-3) = 0.440190; at T the exponents are 1/T, 2/T, 3/T.
@pytest.mark.parametrize("temperature, expected", [(1.0, -0.440190), (0.6, -0.208060), (0.5, -0.145078)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_75_logprobs_are_taken_at_the_sampling_temperature(temperature, expected, dtype):
    """The head's log-probs are those of the distribution that was sampled from.

    Raw ones at 0.6 make the ratio off by 1.2613; raw ones divided by T are -0.733650.
    """
    weight = torch.nn.Parameter(torch.tensor([[2.0], [1.0], [0.0], [-1.0]], dtype=dtype))
    head = LogprobHead(weight, memory_gib=1.0)
    logprobs, _ = head(torch.ones(1, 1, dtype=dtype), torch.tensor([0]), temperature)
    assert logprobs.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_entropy_by_hand(temperature):
    """Equal logits over V tokens: ln V at any temperature; one logit far above the others: 0."""
    head = LogprobHead(torch.nn.Parameter(torch.zeros(8, 1)), 1.0)
    assert head(torch.ones(1, 1), torch.tensor([3]), temperature)[1].item() == pytest.approx(2.0794415)  # ln 8
    head = LogprobHead(torch.nn.Parameter(torch.tensor([[90.0], [0.0], [0.0]])), 1.0)
    assert head(torch.ones(1, 1), torch.tensor([0]), temperature)[1].item() == pytest.approx(0.0, abs=1e-6)


def test_an_empty_row_still_gives_the_weight_a_gradient():
    """No target: the weight's gradient is exactly 0, not None, as the reduction over ranks expects."""
    weight = torch.nn.Parameter(torch.randn(V, H))
    hidden = torch.randn(0, H, requires_grad=True)
    logprobs, entropy = LogprobHead(weight, 1.0)(hidden, torch.empty(0, dtype=torch.long), 1.0)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert torch.equal(weight.grad, torch.zeros(V, H))


@pytest.mark.parametrize("rows", [16, 100])
def test_all_logits_never_exist_at_once(largest_tensor, rows):
    """The largest tensor of forward and backward is a tile of `memory_gib`, or one that the caller has too."""
    n, h, v = 1000, 4, 512
    weight = torch.nn.Parameter(torch.randn(v, h))
    head = LogprobHead(weight, memory_gib=rows * v * BYTES_PER_LOGIT / 2**30)
    hidden = torch.randn(n, h, requires_grad=True)
    with largest_tensor() as largest:
        logprobs, _ = head(hidden, torch.randint(v, (n,)), 1.0)
        logprobs.sum().backward()
    assert largest.numel == max(rows * v, n * h, v * h)


@pytest.mark.parametrize("size, most, steps", [
    (10, 100, [10]), (10, 4, [4, 4, 2]), (9, 4, [3, 3, 3]), (10, 0, [1] * 10), (600, 300, [256, 256, 88]),
    (600, 599, [384, 216]), (256, 129, [128, 128]), (0, 5, []), (130, 128, [128, 2])])
def test_tiles_are_aligned_where_they_can_be(size, most, steps):
    """Every item once, at most `most` of them, nearly equal parts, whole multiples of 128 above that."""
    tiles = _tiles(size, most)
    assert [part.stop - part.start for part in tiles] == steps
    assert [i for part in tiles for i in range(part.start, part.stop)] == list(range(size))


def test_case_79_a_large_vocabulary_takes_a_tile(largest_tensor, close):
    """151,936 words: values and gradients of the direct fp32 computation, and no tensor of even half a copy of the
    logits, forward or backward."""
    n, h, v = 64, 8, 151936
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(n, h, generator=g), torch.randn(v, h, generator=g) / h**0.5
    targets, grad = torch.randint(v, (n,), generator=g), torch.randn(n, generator=g)
    head = LogprobHead(torch.nn.Parameter(weight), memory_gib=n * v * BYTES_PER_LOGIT / 4 / 2**30)
    own = hidden.clone().requires_grad_()
    with largest_tensor() as largest:
        logprobs_N, entropy_N = head(own, targets, 0.7)
        (logprobs_N * grad).sum().backward()
    assert largest.numel <= n * v / 4
    expected = reference(hidden, weight, targets, 0.7, grad)
    for got, want in zip((logprobs_N.detach(), entropy_N.detach(), own.grad, head.weight.grad), expected):
        close(got, want, TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bonus", [False, True])
def test_the_compiled_tiles_are_the_plain_ones(monkeypatch, close, dtype, bonus):
    """What CUDA compiles (here for a CPU, without code generation), for tiles of several sizes, and once for all."""
    data = draw(50, dtype)
    entropy_grad = draw(50)[3] if bonus else None
    plain = tiled(*data[:3], 0.7, data[3], 8 * V, entropy_grad)
    compiled = {}

    def fused(function, is_cuda):
        return compiled.setdefault(function, torch.compile(function, dynamic=True, backend="aot_eager"))

    monkeypatch.setattr(logprobs, "_fused", fused)
    torch._dynamo.reset()
    before = num_compilations()
    for max_logits in (8 * V, 13 * V, 20 * V):
        for a, b in zip(tiled(*data[:3], 0.7, data[3], max_logits, entropy_grad), plain):
            close(a, b, TOLERANCE if dtype == torch.float32 else 0.01)
    assert len(compiled) == 2 and num_compilations() - before == 2
