"""An engine on the policy's own memory: how its parameters become views of it, and whether they still are."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from spmd_rl.load_plan import Unplannable, Weight, record
from spmd_rl.offload import bytes_of

LARGE_BYTES = 2**20  # a parameter of a model that is about to get other memory; modules write to small ones


class Adoption:
    """An engine's parameters as views of weights in this process, and what became of them."""

    def __init__(self) -> None:
        self.why_not: str | None = None
        """Why they are the engine's own; None where they are views."""
        self._placeholders: dict[int, torch.nn.Parameter] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._hook: Any = None
        self._addresses: dict[str, int] = {}
        self._modules: list[tuple[dict[str, Any], str, Any, int]] = []
        self._slots: list[tuple[str, dict[str, Any], str]] = []

    @contextlib.contextmanager
    def in_scratch(self) -> Iterator[None]:
        """In the block and up to `take`, large parameters of a model that is made lie one over the other: in the memory
        of the first of them, or of a later one that is larger.

        A second model would be on the device otherwise. And freed all at once, its memory is taken from vLLM's pool
        behind torch's back: vLLM then finds as much less in use as there was, and makes its KV cache larger by that.
        """
        self._hook = register_module_parameter_registration_hook(self._place)
        try:
            yield
        finally:
            self._leave_scratch()

    def _place(self, module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
        if is_lazy(parameter) or parameter.device.type not in ("cpu", "cuda"):
            return  # no memory yet
        storage, width = parameter.untyped_storage(), parameter.dtype.itemsize
        if storage.nbytes() < LARGE_BYTES or storage.nbytes() % width:
            return
        self._placeholders[id(parameter)] = parameter
        if self._scratch.device != storage.device or len(self._scratch) < storage.nbytes():
            self._scratch = bytes_of(storage)
        else:  # a storage of its own over the same memory: a plan tells parameters apart by theirs
            shared = torch.from_dlpack(self._scratch[:storage.nbytes()]).view(parameter.dtype)
            parameter.data = shared.as_strided(parameter.shape, parameter.stride(), parameter.storage_offset())

    def _leave_scratch(self) -> None:
        if self._hook:
            self._hook.remove()
        self._scratch = self._scratch.new_empty(0)

    def take(self, model: Any, weights: Sequence[Weight], why_not: str | None = None) -> bool:
        """Make each parameter of the model a view of the weights' memory, and return whether all are; else, or where
        why_not is known, each has memory of its own."""
        self._leave_scratch()  # what is registered from now on is no placeholder
        parameters = dict(model.named_parameters())
        placeholders, self._placeholders = self._placeholders, {}
        self.why_not = why_not
        views: dict[str, Tensor] = {}
        if not why_not:
            try:
                views = record(parameters, {weight.name: (weight.shape, weight.dtype) for weight in weights},
                               model.load_weights).shared_views(weights)
            except Unplannable as error:
                self.why_not = str(error)
        if self.why_not:
            for parameter in parameters.values():
                if id(parameter) in placeholders:
                    parameter.data = torch.empty_like(parameter.data)
            return False
        for name, view in views.items():
            parameters[name].data = view
        self._addresses = {name: parameter.data_ptr() for name, parameter in parameters.items()}
        return True

    def lost(self, model: Any) -> list[str]:
        """Names of parameters that are no longer the views that they became: vLLM repacked them, or they moved."""
        if not self._slots or any(_count(module) != count or modules.get(key) is not module
                                  for modules, key, module, count in self._modules):
            if new := dict(model.named_parameters()).keys() - self._addresses.keys():
                return sorted(new)
            # Where each is looked up: a walk over all modules takes longer than the rest of a sync.
            named: dict[str, Any] = dict(model.named_modules())
            self._modules = [(parent._modules, key, module, _count(module))
                             for parent in named.values() for key, module in parent._modules.items()
                             if module is not None]
            self._slots = [(name, module._parameters, key) for prefix, module in named.items()
                           for key in module._parameters if (name := f"{prefix}.{key}".lstrip(".")) in self._addresses]
        now = {name: parameters[key].data_ptr() for name, parameters, key in self._slots
               if parameters.get(key) is not None}
        return sorted(name for name, address in self._addresses.items() if now.get(name) != address)


def _count(module: Any) -> int:
    return sum(parameter is not None for parameter in module._parameters.values())
