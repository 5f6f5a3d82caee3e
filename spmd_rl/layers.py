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
MLP_PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")


def compile_layers(lm: Any) -> None:
    """Replace the forwards of a Transformers model's norms and gated MLPs, and its module's rotary function.

    What computes something else under those names stays as it is. The rotary function is that of all models of the
    architecture in this process.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_COMPILATIONS)
    for module in lm.modules():
        is_norm = type(module).__name__.endswith("RMSNorm")
        if "forward" in vars(module) or not (is_norm or _is_gated_mlp(module)):
            continue
        if len(inspect.signature(module.forward).parameters) == 1:
            module.forward = functools.partial(_norm if is_norm else _gated_mlp, module)
    names = vars(sys.modules[type(lm).__module__])
    rotary = names.get("apply_rotary_pos_emb")
    if inspect.isfunction(rotary) and _takes_heads_first(rotary):
        names["apply_rotary_pos_emb"] = functools.partial(_rotary, rotary)


def _takes_heads_first(rotary: Callable[..., Any]) -> bool:
    arguments = inspect.signature(rotary).parameters
    return list(arguments) == ["q", "k", "cos", "sin", "unsqueeze_dim"] and arguments["unsqueeze_dim"].default == 1


def _is_gated_mlp(module: Any) -> bool:
    """Whether its forward is down(act(gate(x)) * up(x)) and no more: tried with other functions in the projections'
    place, since weights may be elsewhere. A forward that reads anything else of the module fails in that."""
    if not all(isinstance(getattr(module, name, None), nn.Module) for name in MLP_PARTS):
        return False
    gate, up, down = (lambda x: 1e3 * torch.sin(x)), (lambda x: 1e3 * torch.cos(x)), torch.neg
    x = torch.linspace(-3, 3, 64)
    try:
        found = type(module).forward(SimpleNamespace(gate_proj=gate, up_proj=up, down_proj=down, act_fn=module.act_fn),
                                     x)
        return torch.equal(found, down(module.act_fn(gate(x)) * up(x)))
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


def _rotary(function: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor,
            unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """q and k (1, heads, S, head size) for unsqueeze_dim 1; cos and sin (1, S, head size)."""
    if torch.compiler.is_compiling():  # in a model of somebody else's, as vLLM's Transformers backend: marks break it
        return function(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    tokens = 2 if unsqueeze_dim == 1 else 1
    return _compiled(function)(_any_length(q, tokens), _any_length(k, tokens), _any_length(cos, 1),
                               _any_length(sin, 1), unsqueeze_dim=unsqueeze_dim)
