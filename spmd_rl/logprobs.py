"""Log-probs of target tokens without ever holding all logits.

The vocabulary projection, its softmax and its gradient are done tile by tile, in one autograd function whose weight
gradient leaves through the module that owns the weight: right for tied and untied heads at every ZeRO stage, where
anything outside a module's forward is not. Forward takes tiles of tokens, since a softmax needs the whole vocabulary.
Backward has its normaliser by then and takes tiles of the vocabulary: each one's part of the weight's gradient is then
whole after one product, where tiles of tokens would add each of theirs to all of it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

BYTES_PER_LOGIT = 8  # fp32, and its gradient in the weight's type; on a CPU, where nothing is fused, some copies more
ALIGNED = 128  # tiles are multiples of it where they are larger: products of odd sizes are slow on a GPU


class LogprobHead(nn.Module):
    """The output projection of a language model, returning log-probs of targets in place of logits."""

    def __init__(self, weight: nn.Parameter, memory_gib: float) -> None:
        """weight: the projection (V, H), the embedding's own parameter where the model ties them."""
        super().__init__()
        self.weight = weight
        self._max_logits = max(1, int(memory_gib * 2**30 / BYTES_PER_LOGIT))

    def forward(self, hidden_NH: Tensor, target_ids_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """(logprobs_N, entropy_N) in fp32, both with gradient.

        log softmax(hidden weight^T / temperature) at the targets; the division follows the upcast, since
        bf16 logits divided first are off by up to 0.075.
        """
        return TiledLogprobs.apply(hidden_NH, self.weight, target_ids_N, temperature, self._max_logits)


class TiledLogprobs(torch.autograd.Function):
    """At most `max_logits` logits at once, or one token's or one word's; backward computes them again."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, target_ids_N: Tensor, temperature: float,
                max_logits: int) -> tuple[Tensor, Tensor]:
        statistics = _fused(_statistics, hidden_NH.is_cuda)
        # A tensor: a number would be compiled in, and anew for each.
        divisor = torch.full((), temperature, dtype=torch.float32, device=hidden_NH.device)
        logprobs_N = torch.empty(hidden_NH.shape[0], dtype=torch.float32, device=hidden_NH.device)
        entropy_N, normalizer_N = torch.empty_like(logprobs_N), torch.empty_like(logprobs_N)
        for part in _tiles(hidden_NH.shape[0], max_logits // weight_VH.shape[0]):
            logits = _matmul_fp32(hidden_NH[part], weight_VH.T)
            logprobs_N[part], entropy_N[part], normalizer_N[part] = statistics(logits, target_ids_N[part], divisor)
        # Saving the parameter itself keeps ZeRO-3's re-gathered data visible in backward.
        ctx.save_for_backward(hidden_NH, weight_VH, target_ids_N, divisor, normalizer_N, entropy_N)
        ctx.max_logits = max_logits
        ctx.set_materialize_grads(False)  # None where a loss has no use for the entropy: its part is left out
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_logprobs_N: Tensor | None,  # type: ignore[override]
                 grad_entropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, target_ids_N, divisor, normalizer_N, entropy_N = ctx.saved_tensors
        if not hidden_NH.shape[0]:
            return torch.zeros_like(hidden_NH), torch.zeros_like(weight_VH), None, None, None
        logit_gradient = _fused(_logit_gradient, hidden_NH.is_cuda)
        grad_N = torch.zeros_like(normalizer_N) if grad_logprobs_N is None else grad_logprobs_N
        grad_hidden = torch.zeros(hidden_NH.shape, dtype=torch.float32, device=hidden_NH.device)
        grad_weight = torch.empty_like(weight_VH)
        for part in _tiles(weight_VH.shape[0], ctx.max_logits // hidden_NH.shape[0]):
            words = weight_VH[part]
            logits = _matmul_fp32(hidden_NH, words.T)
            grad_logits = logit_gradient(logits, target_ids_N - part.start, divisor, normalizer_N, entropy_N, grad_N,
                                         grad_entropy_N, weight_VH.dtype)
            del logits  # before the products' results take memory
            grad_hidden += _matmul_fp32(grad_logits, words)
            grad_weight[part] = _matmul_fp32(grad_logits.T, hidden_NH)  # in fp32 to the end of the sum, then rounded
        return grad_hidden.to(hidden_NH.dtype), grad_weight, None, None, None


def _statistics(logits_NV: Tensor, target_ids_N: Tensor, divisor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(logprobs_N, entropy_N, log of the sum of exponentials)."""
    scaled = logits_NV / divisor
    normalizer_N = scaled.logsumexp(-1)
    logprobs_NV = scaled - normalizer_N[:, None]
    # - sum p log p, and not log Z - sum p x, which cancels.
    entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    return logprobs_NV.gather(-1, target_ids_N[:, None])[:, 0], entropy_N, normalizer_N


def _logit_gradient(logits_NC: Tensor, target_N: Tensor, divisor: Tensor, normalizer_N: Tensor, entropy_N: Tensor,
                    grad_N: Tensor, grad_entropy_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Gradient by a tile of the logits; target_N counts from the tile's first word, and may be outside of it.

    d logprob / d logits = onehot - p and d entropy / d logits = - p (log p + entropy), over the temperature.
    """
    logprobs_NC = logits_NC / divisor - normalizer_N[:, None]
    is_target_NC = torch.arange(logits_NC.shape[1], device=logits_NC.device)[None, :] == target_N[:, None]
    factor = grad_N[:, None]
    if grad_entropy_N is not None:
        factor = factor + grad_entropy_N[:, None] * (logprobs_NC + entropy_N[:, None])
    grad = torch.where(is_target_NC, grad_N[:, None], 0.0) - logprobs_NC.exp() * factor
    return (grad / divisor).to(dtype)


@functools.cache
def _fused(function: Callable[..., Any], is_cuda: bool) -> Callable[..., Any]:
    """The function as one pass over a tile on CUDA, for tiles of any size; as it is elsewhere."""
    return torch.compile(function, dynamic=True) if is_cuda else function


def _tiles(size: int, most: int) -> list[slice]:
    """Neighbouring parts of nearly equal size, at most `most` items, multiples of ALIGNED where that allows it."""
    count = -(-size // max(1, most))
    step = max(1, -(-size // max(1, count)))
    if most >= ALIGNED:
        step = min(-(-step // ALIGNED), most // ALIGNED) * ALIGNED
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def _matmul_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Product with an fp32 result: of bf16 operands the sum is in fp32 and would only be rounded at the end."""
    if a.dtype == torch.float32:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()  # a CPU's product has no out_dtype
