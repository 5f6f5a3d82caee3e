"""Tensors in pieces: each rank writes those that it holds, and any number of ranks reads the ranges that it wants.

A piece is a range of a tensor that was laid out flat, under the key KIND/START/NAME in a safetensors file. What has no
range (a count of steps) is a piece without axes. The shapes of the whole tensors are in each file's metadata.
"""

import contextlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

PIECE_ELEMENTS = 2**24  # so that a piece fits a host buffer, and no more than one is copied at a time
FILE_BYTES = 2**32
CHUNK_BYTES = 2**30
ALIGN_BYTES = 64


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + tensor.numel()) of `kind` of the tensor called `name`, or a scalar of it."""

    kind: str
    name: str
    start: int
    tensor: Tensor

    @property
    def key(self) -> str:
        """Its name in a file."""
        return f"{self.kind}/{self.start}/{self.name}"


def cut(kind: str, name: str, start: int, flat: Tensor) -> Iterator[Piece]:
    """A range of a tensor as pieces of a bounded size; a tensor without axes is one piece."""
    if not flat.dim():
        yield Piece(kind, name, start, flat)
        return
    for first in range(0, flat.numel(), PIECE_ELEMENTS):
        yield Piece(kind, name, start + first, flat[first:first + PIECE_ELEMENTS])


def write(folder: str, prefix: str, pieces: Iterable[Piece], shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Write pieces into PREFIX-0.safetensors, PREFIX-1.safetensors, ... of a bounded size; returns the names.

    shapes: of the whole tensors. Pieces that are not on the host are copied there, a file's at a time.
    """
    metadata = {"shapes": json.dumps(shapes)}
    names: list[str] = []
    batch: dict[str, Tensor] = {}
    num_bytes = 0

    def flush() -> None:
        nonlocal batch, num_bytes
        names.append(f"{prefix}-{len(names)}.safetensors")
        save_file(batch, os.path.join(folder, names[-1]), metadata)
        batch, num_bytes = {}, 0

    for piece in pieces:
        size = piece.tensor.nbytes
        if batch and num_bytes + size > FILE_BYTES:
            flush()
        tensor = piece.tensor.detach().cpu()
        batch[piece.key] = tensor if tensor.dim() else tensor.clone()  # one count may stand for several names
        num_bytes += size
    flush()  # also an empty one: each rank's files are there, or a rank's are missing
    return names


class HostBuffers:
    """Host memory for copies of pieces, made once and used again by each save; pinned beside a GPU."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._chunks: list[Tensor] = []

    def copy(self, pieces: Iterable[Piece]) -> list[Piece]:
        """The pieces with their tensors on the host, good until the next call; returns once all are copied."""
        pieces = list(pieces)
        sizes = [-(-piece.tensor.nbytes // ALIGN_BYTES) * ALIGN_BYTES for piece in pieces]
        left = sum(sizes)
        chunk, used = -1, 0
        copies = []
        for piece, size in zip(pieces, sizes, strict=True):
            while chunk < 0 or used + size > self._chunks[chunk].numel():
                chunk, used = chunk + 1, 0
                if chunk == len(self._chunks):
                    # A single block a tensor would be rounded up to a power of two by torch, each.
                    self._chunks.append(torch.empty(max(size, min(left, CHUNK_BYTES)), dtype=torch.uint8,
                                                    pin_memory=self._pinned))
            source = piece.tensor.detach()
            host = self._chunks[chunk][used:used + source.nbytes].view(source.dtype).view(source.shape)
            host.copy_(source, non_blocking=True)
            copies.append(Piece(piece.kind, piece.name, piece.start, host))
            used, left = used + size, left - size
        if self._pinned:
            torch.cuda.synchronize()  # the device's tensors change with the next step, the copies are read by a thread
        return copies


class Shards:
    """The pieces in a folder's safetensors files, as whole tensors."""

    def __init__(self, folder: str) -> None:
        """Open the files, which stay mapped until `close`. Raises RuntimeError where there are none."""
        self._stack = contextlib.ExitStack()
        self._folder = folder
        self._pieces: dict[str, dict[str, list[tuple[int, int, Any, str]]]] = defaultdict(lambda: defaultdict(list))
        self.shapes: dict[str, tuple[int, ...]] = {}
        paths = sorted(name for name in os.listdir(folder) if re.fullmatch(r"rank-\d+-\d+\.safetensors", name))
        if not paths:
            raise RuntimeError(f"no shards in {folder}")
        for path in paths:
            file = self._stack.enter_context(safe_open(os.path.join(folder, path), "pt"))
            self.shapes.update({name: tuple(shape) for name, shape in json.loads(file.metadata()["shapes"]).items()})
            for key in file.keys():
                kind, start, name = key.split("/", 2)
                shape = file.get_slice(key).get_shape()
                count = shape[0] if shape else 0
                self._pieces[name][kind].append((int(start), count, file, key))
        for kinds in self._pieces.values():
            for pieces in kinds.values():
                pieces.sort(key=lambda piece: piece[:2])

    def __enter__(self) -> "Shards":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the files."""
        self._stack.close()

    def kinds(self, name: str) -> list[str]:
        """What is there of a tensor."""
        return sorted(self._pieces[name])

    def is_scalar(self, kind: str, name: str) -> bool:
        """Whether it has no range."""
        return not self._of(kind, name)[0][1]

    def scalar(self, kind: str, name: str) -> Tensor:
        """A tensor without axes."""
        _, _, file, key = self._of(kind, name)[0]
        return file.get_tensor(key)

    def read_into(self, flat: Tensor, kind: str, name: str, start: int) -> None:
        """Fill `flat` with elements [start, start + flat.numel()). Raises RuntimeError where some are not there."""
        end, filled = start + flat.numel(), start
        for first, count, file, key in self._of(kind, name):
            if first <= filled < min(end, first + count):
                last = min(end, first + count)
                flat[filled - start:last - start].copy_(file.get_slice(key)[filled - first:last - first])
                filled = last
        if filled < end:
            raise RuntimeError(f"{self._folder} has no element {filled} of {kind} of {name}, of {start} to {end}")

    def whole(self, kind: str, name: str) -> Tensor:
        """All of a tensor, in its shape and in the type that it was written in."""
        _, _, file, key = self._of(kind, name)[0]
        shape = torch.Size(self.shapes[name])
        flat = torch.empty(shape.numel(), dtype=file.get_slice(key)[:1].dtype)
        self.read_into(flat, kind, name, 0)
        return flat.view(shape)

    def _of(self, kind: str, name: str) -> list[tuple[int, int, Any, str]]:
        found = self._pieces[name][kind]
        if not found:
            raise RuntimeError(f"{self._folder} has no {kind} of {name}: was it written by a run of another model?")
        return found
