"""The element-wise parts of a block as compiled kernels: norms, an MLP's gate, rotary positions.

As they stand they are some twenty passes over memory a block, a third of the time of a forward on a fast GPU. Each part
is compiled by itself and not the whole block, so that hooks, checkpointing and attention stay as they are.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

BACKEND = "inductor"
MAX_COMPILATIONS = 64  # of one function: ranks of its input, with and without gradient, policy and reference
ROTARY_ARGUMENTS = ["q", "k", "cos", "sin", "unsqueeze_dim"]


def compile_layers(lm: Any) -> None:
    """Replace the forwards of a Transformers model's norms and gated MLPs, and its module's rotary function.

    What computes something else under those names stays as it is. The rotary function is that of all models of the
    architecture in this process.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_COMPILATIONS)
    for module in lm.modules():
        if type(module).__name__.endswith("RMSNorm") and len(inspect.signature(module.forward).parameters) == 1:
            module.forward = functools.partial(_norm, module)
        elif _is_gated_mlp(module):
            module.forward = functools.partial(_gated_mlp, module)
    names = vars(sys.modules[type(lm).__module__])
    rotary = names.get("apply_rotary_pos_emb")
    if inspect.isfunction(rotary) and list(inspect.signature(rotary).parameters) == ROTARY_ARGUMENTS:
        names["apply_rotary_pos_emb"] = functools.partial(_rotary, rotary)


def _is_gated_mlp(module: Any) -> bool:
    """Whether its forward is down(act(gate(x)) * up(x)) and no more: tried with other functions in the projections'
    place, since weights may be elsewhere. A forward that reads anything else of the module fails in that."""
    if not all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        return False
    parts = SimpleNamespace(gate_proj=torch.sin, up_proj=torch.cos, down_proj=torch.exp, act_fn=module.act_fn)
    x = torch.linspace(-2, 2, 16)
    try:
        return torch.equal(type(module).forward(parts, x), torch.exp(module.act_fn(torch.sin(x)) * torch.cos(x)))
    except Exception:  # of a stranger's code, whatever it is
        return False


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, backend=BACKEND)


def _any_length(tensor: Tensor, dim: int) -> Tensor:
    """The tensor, marked so that one compilation serves every number of tokens."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)
    return tensor


def _norm(module: nn.Module, hidden: Tensor) -> Tensor:
    """hidden (1, S, H), or with heads before or after S: the models differ in that."""
    for dim in range(1, hidden.ndim - 1):
        _any_length(hidden, dim)
    return _compiled(type(module).forward)(module, hidden)


def _gated_mlp(module: Any, hidden_1SH: Tensor) -> Tensor:
    gate, up = module.gate_proj(hidden_1SH), module.up_proj(hidden_1SH)
    return module.down_proj(_compiled(_gated)(module.act_fn, _any_length(gate, 1), _any_length(up, 1)))


def _gated(activation: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
    # Not through the module's call: at ZeRO 3 its hooks would be compiled, anew for every layer and length.
    return activation.forward(gate) * up


def _rotary(function: Callable[..., Any], query: Tensor, key: Tensor, cos: Tensor, sin: Tensor,
            unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """query and key (1, heads, S, head size) for unsqueeze_dim 1; cos and sin (1, S, head size)."""
    tokens = 2 if unsqueeze_dim == 1 else 1
    return _compiled(function)(_any_length(query, tokens), _any_length(key, tokens), _any_length(cos, 1),
                               _any_length(sin, 1), unsqueeze_dim=unsqueeze_dim)
