"""What vLLM's own loading does with each weight, written down once: which slice goes to which slice of which engine
tensor.

The engine's `load_weights` runs over tensors without data, and every copy into one of its parameters is noted in place
of being made. From then on a load is these copies alone; for an engine whose parameters are to be views of the policy's
storage (`adoption`) it says where each of them has to lie.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

HASH_FACTORS = (-0x61C8864680B583EB, 0x2545F4914F6CDD1D)  # odd, of 64 bits
FINGERPRINT_ELEMENTS = 2**22  # looked at at once: torch makes an int64 copy of what it sums


class Unplannable(Exception):
    """Loading this model is not copies alone; the text says why."""


@dataclass(frozen=True)
class Span:
    """Elements [start, start + flat.numel()) of a weight laid out flat."""

    start: int
    flat: Tensor


@dataclass(frozen=True, eq=False)
class Weight:
    """A whole weight in parts that may lie anywhere: in this process, or in a peer's memory. Equal to itself alone."""

    name: str
    """Hugging Face's."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    spans: Sequence[Span]
    """In order; without gaps where the weight is whole."""

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "Weight":
        """One that lies in one piece."""
        return cls(name, tuple(tensor.shape), tensor.dtype, [Span(0, tensor.detach().view(-1))])

    def whole(self, device: torch.device) -> Tensor:
        """In its shape: where it lies if it is in one piece, else put together in new memory of the device."""
        if len(self.spans) == 1:
            return self.spans[0].flat.view(self.shape)
        flat = torch.empty(sum(span.flat.numel() for span in self.spans), dtype=self.dtype, device=device)
        for span in self.spans:
            flat[span.start:span.start + span.flat.numel()].copy_(span.flat)
        return flat.view(self.shape)

    def fingerprint(self, device: torch.device) -> int:
        """A number that any one other bit changes, and other values or another order all but certainly: each element's
        bits times an odd number that its place is hashed to, modulo 2^64.

        device: where a part of it at a time is looked at, with some more memory.
        """
        total = torch.zeros((), dtype=torch.int64, device=device)
        for span in self.spans:
            start = span.start
            for part in _bits(span.flat).split(FINGERPRINT_ELEMENTS):
                place = torch.arange(start, start + len(part), device=device)
                for factor in HASH_FACTORS:
                    place.mul_(factor).bitwise_xor_(place >> 29)
                total += place.bitwise_or_(1).mul_(part.to(device)).sum()
                start += len(part)
        return int(total)


@dataclass(frozen=True)
class Copy:
    """A slice of a weight, and the slice of an engine's parameter that it fills."""

    source: tuple[tuple[int, ...], tuple[int, ...], int]
    """Sizes, strides and offset in elements of the slice, in the weight laid out flat."""
    parameter: str
    """vLLM's name."""
    start: int
    """First element of the parameter that is filled; the rest follow without gaps."""
    target: Tensor

    @property
    def is_contiguous(self) -> bool:
        """Whether the slice is one range of the weight laid out flat."""
        expected = 1
        for size, stride in zip(*(reversed(part) for part in self.source[:2])):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True


class LoadPlan:
    """All copies of a model's load."""

    def __init__(self, parameters: Mapping[str, Tensor], copies: Mapping[str, Sequence[Copy]],
                 zeros: Sequence[Tensor]) -> None:
        """copies: by weight; zeros: what loading fills with 0, the padding of a vocabulary."""
        self._parameters, self._copies, self._zeros = parameters, copies, zeros
        self._addresses = {name: parameter.data_ptr() for name, parameter in parameters.items()}
        # Of weights that come again in the next sync, as long as somebody keeps them.
        self._pairs_of: WeakKeyDictionary[Weight, list[tuple[Tensor, Tensor]]] = WeakKeyDictionary()

    @property
    def num_copies(self) -> int:
        """Of a load."""
        return sum(map(len, self._copies.values()))

    @property
    def moved(self) -> list[str]:
        """Parameters that are no longer where they were: the plan's copies would go to memory of something else."""
        return [name for name, parameter in self._parameters.items() if parameter.data_ptr() != self._addresses[name]]

    @torch.no_grad()
    def load(self, weights: Iterable[Weight]) -> None:
        """Make the copies, each weight's as it comes, on the current stream. Raises RuntimeError where not all came."""
        for tensor in self._zeros:
            tensor.zero_()
        missing = set(self._copies)
        for weight in weights:
            pairs: Iterable[tuple[Tensor, Tensor]] | None = self._pairs_of.get(weight)
            if pairs is None:
                pairs = self._pairs(weight)
                if self._is_read_in_place(weight):
                    pairs = self._pairs_of[weight] = list(pairs)
            for target, source in pairs:
                target.copy_(source)
            missing.discard(weight.name)
        if missing:
            raise RuntimeError(f"weight sync ended without {len(missing)} of {len(self._copies)} weights: "
                               f"{sorted(missing)[:8]}")

    @torch.no_grad()
    def differences(self, weights: Iterable[Weight]) -> list[str]:
        """Names of weights whose slices in the engine have other bits than they."""
        return [weight.name for weight in weights
                # Copied to the target's device: a peer's memory may be on another GPU, and torch compares on one.
                if not all(_same_bits(target, source.to(target.device)) for target, source in self._pairs(weight))]

    def _is_read_in_place(self, weight: Weight) -> bool:
        """Whether the sources of its pairs are views of its own memory, all of them."""
        return len(weight.spans) == 1 or all(copy.is_contiguous for copy in self._copies[weight.name])

    def _pairs(self, weight: Weight) -> Iterator[tuple[Tensor, Tensor]]:
        """(engine's slice, what goes there), straight from where the weight lies if that is possible."""
        for copy in self._copies[weight.name]:
            sizes, strides, offset = copy.source
            if len(weight.spans) == 1:
                yield copy.target, weight.spans[0].flat.as_strided(
                    sizes, strides, weight.spans[0].flat.storage_offset() + offset)
            elif copy.is_contiguous:
                target = copy.target.view(-1)
                for span in weight.spans:
                    low = max(offset, span.start)
                    high = min(offset + target.numel(), span.start + span.flat.numel())
                    if low < high:
                        yield target[low - offset:high - offset], span.flat[low - span.start:high - span.start]
            else:  # columns of a row-parallel layer, of a weight in parts
                yield copy.target, weight.whole(copy.target.device).as_strided(sizes, strides, offset)

    def shared_views(self, weights: Iterable[Weight]) -> dict[str, Tensor]:
        """Engine parameter -> view of the weights' own memory with the same content, no byte copied.

        Raises Unplannable where one has none: padding, parts that are not neighbours, or an address that kernels do not
        take.
        """
        if padding := sum(tensor.numel() for tensor in self._zeros):
            raise Unplannable(f"vLLM pads the vocabulary by {padding} elements")
        by_name = {weight.name: weight for weight in weights}
        parts: dict[str, list[tuple[int, Tensor]]] = {}
        for name, copies in self._copies.items():
            for copy in copies:
                if len(by_name[name].spans) != 1 or not copy.is_contiguous:
                    raise Unplannable(f"{name} does not lie in one piece")
                flat, offset = by_name[name].spans[0].flat, copy.source[2]
                parts.setdefault(copy.parameter, []).append((copy.start, flat[offset:offset + copy.target.numel()]))
        return {name: _neighbours(name, sorted(found, key=lambda part: part[0]), self._parameters[name])
                for name, found in parts.items()}


def _neighbours(name: str, parts: Sequence[tuple[int, Tensor]], parameter: Tensor) -> Tensor:
    """The parameter as a view over parts that follow one another in one storage."""
    first = parts[0][1]
    for start, part in parts:
        if (part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
                or part.storage_offset() != first.storage_offset() + start):
            raise Unplannable(f"what vLLM fuses to {name} are no neighbours in the policy's memory")
    if first.data_ptr() % 16:
        raise Unplannable(f"{name} would begin at an address that is no multiple of 16")
    return first.as_strided(parameter.shape, parameter.stride(), first.storage_offset())


class _Recorder(TorchDispatchMode):
    """Notes what is written to an engine's parameters, and writes nothing."""

    def __init__(self, parameters: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._parameters = {p.untyped_storage()._cdata: (name, p) for name, p in parameters.items()}
        self._weights = {tensor.untyped_storage()._cdata: (name, tensor.dtype) for name, tensor in weights.items()}
        self.copies: dict[str, list[Copy]] = {name: [] for name in weights}
        self.zeros: list[tuple[str, int, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, declared in zip(args, func._schema.arguments):
            is_written = declared.alias_info is not None and declared.alias_info.is_write
            if is_written and isinstance(argument, Tensor) and argument.untyped_storage()._cdata in self._parameters:
                self._note(func, argument, args[1:])
                return argument
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, target: Tensor, rest: Sequence[Any]) -> None:
        name, parameter = self._parameters[target.untyped_storage()._cdata]
        start = int(target.storage_offset() - parameter.storage_offset())
        if not target.numel():
            return
        if not target.is_contiguous():
            raise Unplannable(f"{name} is filled with gaps")
        if func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default) and not any(rest):
            self.zeros.append((name, start, target))
            return
        source = rest[0] if func is torch.ops.aten.copy_.default else None
        if not isinstance(source, Tensor) or not self._is_slice(source, target):
            raise Unplannable(f"{name} is not a copy of a weight's slice")
        weight, _ = self._weights[source.untyped_storage()._cdata]
        self.copies[weight].append(
            Copy((tuple(source.shape), source.stride(), int(source.storage_offset())), name, start, target))

    def _is_slice(self, source: Tensor, target: Tensor) -> bool:
        """Whether it is elements of a weight as they are, all that the target takes."""
        _, dtype = self._weights.get(source.untyped_storage()._cdata, ("", None))
        return source.dtype == dtype == target.dtype and source.shape == target.shape and not source.is_neg()


def record(parameters: Mapping[str, Tensor], shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
           load: Callable[[Iterator[tuple[str, Tensor]]], Any]) -> LoadPlan:
    """The plan of `load` over weights of these shapes and dtypes, which fills these parameters; nothing is written.

    Raises Unplannable where loading is more than copies, or leaves an element out or fills it twice.
    """
    weights = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()}
    recorder = _Recorder(parameters, weights)
    try:
        with recorder:
            load(iter(weights.items()))
    except Unplannable:
        raise
    except Exception as error:  # of vLLM's loaders: a repacked parameter has another shape, data is looked at, ...
        raise Unplannable(f"{type(error).__name__}: {error}") from error
    filled: dict[str, list[tuple[int, int]]] = {name: [] for name in parameters}
    for copies in recorder.copies.values():
        for copy in copies:
            filled[copy.parameter].append((copy.start, copy.start + copy.target.numel()))
    for name, start, target in recorder.zeros:
        filled[name].append((start, start + target.numel()))
    wrong = [name for name, ranges in filled.items() if not _covers(sorted(ranges), parameters[name].numel())]
    wrong += [name for name, copies in recorder.copies.items() if not copies]
    if wrong:
        raise Unplannable(f"not filled exactly once: {', '.join(wrong[:8])}")
    return LoadPlan(parameters, recorder.copies, [target for _, _, target in recorder.zeros])


def _covers(ranges: Sequence[tuple[int, int]], count: int) -> bool:
    ends = [0, *(end for _, end in ranges)]
    return [start for start, _ in ranges] == ends[:-1] and ends[-1] == count


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """NaN equals NaN, and 0 is not -0."""
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
