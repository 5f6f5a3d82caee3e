"""Log-probs of target tokens without ever holding all logits.

The vocabulary projection, its softmax and its gradient are done tile by tile over target tokens, in
one autograd function whose weight gradient leaves through the module that owns the weight: right for
tied and untied heads at every ZeRO stage, where anything outside a module's forward is not.
"""

from typing import Any

import torch
from torch import Tensor, nn

BYTES_PER_LOGIT = 16  # fp32 logits, their softmax, its gradient, and its copy in the weight's type


class LogprobHead(nn.Module):
    """The output projection of a language model, returning log-probs of targets in place of logits."""

    def __init__(self, weight: nn.Parameter, memory_gib: float) -> None:
        """weight: the projection (V, H), the embedding's own parameter where the model ties them."""
        super().__init__()
        self.weight = weight
        self._memory_bytes = memory_gib * 2**30

    def forward(self, hidden_NH: Tensor, target_ids_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """(logprobs_N, entropy_N) in fp32, both with gradient.

        log softmax(hidden weight^T / temperature) at the targets; the division follows the upcast, since
        bf16 logits divided first are off by up to 0.075.
        """
        tile = max(16, int(self._memory_bytes / (BYTES_PER_LOGIT * self.weight.shape[0])))
        return TiledLogprobs.apply(hidden_NH, self.weight, target_ids_N, temperature, tile)


class TiledLogprobs(torch.autograd.Function):
    """Tiles over N; backward computes each tile's logits again from the saved hidden states."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, target_ids_N: Tensor, temperature: float,
                tile: int) -> tuple[Tensor, Tensor]:
        logprobs_N = torch.empty(hidden_NH.shape[0], dtype=torch.float32, device=hidden_NH.device)
        entropy_N, normalizer_N = torch.empty_like(logprobs_N), torch.empty_like(logprobs_N)
        for start in range(0, hidden_NH.shape[0], tile):
            part = slice(start, start + tile)
            logits = _logits(hidden_NH[part], weight_VH, temperature)
            normalizer_N[part] = normalizer = logits.logsumexp(-1)
            logprobs_N[part] = logits.gather(-1, target_ids_N[part, None])[:, 0] - normalizer
            # - sum p log p, and not log Z - sum p x, which cancels; in place, the logits are not needed again.
            logits.sub_(normalizer[:, None])
            entropy_N[part] = -logits.exp().mul_(logits).sum(-1)
        # Saving the parameter itself keeps ZeRO-3's re-gathered data visible in backward.
        ctx.save_for_backward(hidden_NH, weight_VH, target_ids_N, normalizer_N, entropy_N)
        ctx.temperature, ctx.tile = temperature, tile
        ctx.set_materialize_grads(False)  # None where a loss has no use for the entropy: its part is left out
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_logprobs_N: Tensor | None,  # type: ignore[override]
                 grad_entropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, target_ids_N, normalizer_N, entropy_N = ctx.saved_tensors
        grad_N = torch.zeros_like(normalizer_N) if grad_logprobs_N is None else grad_logprobs_N
        grad_hidden = torch.empty_like(hidden_NH)
        grad_weight = torch.zeros(weight_VH.shape, dtype=torch.float32, device=weight_VH.device)
        for start in range(0, hidden_NH.shape[0], ctx.tile):
            part = slice(start, start + ctx.tile)
            # d logprob / d logits = onehot - softmax, over the temperature.
            scale = grad_N[part, None] / ctx.temperature
            grad_logits = _logits(hidden_NH[part], weight_VH, ctx.temperature).sub_(normalizer_N[part, None])
            if grad_entropy_N is None:
                grad_logits.exp_().mul_(-scale)
            else:
                # d entropy / d logits = - p (log p + entropy).
                entropy_scale = grad_entropy_N[part, None] / ctx.temperature
                factor = (grad_logits + entropy_N[part, None]).mul_(-entropy_scale).sub_(scale)
                grad_logits = grad_logits.exp_().mul_(factor)
            grad_logits.scatter_add_(-1, target_ids_N[part, None], scale)
            grad_logits = grad_logits.to(weight_VH.dtype)
            grad_hidden[part] = grad_logits @ weight_VH
            grad_weight += _matmul_fp32(grad_logits.T, hidden_NH[part])
        return grad_hidden, grad_weight.to(weight_VH.dtype), None, None, None


def _logits(hidden: Tensor, weight_VH: Tensor, temperature: float) -> Tensor:
    return _matmul_fp32(hidden, weight_VH.T).div_(temperature)


def _matmul_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Product with an fp32 result: of bf16 operands the sum is in fp32 and would only be rounded at the end."""
    if a.dtype == torch.float32:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()  # a CPU's product has no out_dtype
