"""Tensors in pieces: what some ranks write in their parts, others read in theirs."""

import os

import pytest
import torch

from spmd_rl import shards
from spmd_rl.shards import HostBuffers, Piece, Shards, cut, write

TENSORS = {"a": torch.arange(7.0), "b.weight": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
           "c/d": torch.tensor([[5.0]])}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


def pieces_of(rank, num_ranks):
    """Each tensor's part of a rank as ZeRO-3 shares it out: the last ranks may have less, or nothing."""
    for name, tensor in TENSORS.items():
        size = -(-tensor.numel() // num_ranks)
        flat = tensor.view(-1)[rank * size:(rank + 1) * size]
        if flat.numel():
            yield from cut("master", name, rank * size, flat)
            yield from cut("step", name, rank * size, torch.tensor(3.0))


@pytest.fixture(params=[2**24, 2], ids=["one piece", "small pieces"])
def piece_elements(request, monkeypatch):
    monkeypatch.setattr(shards, "PIECE_ELEMENTS", request.param)


@pytest.mark.parametrize("file_bytes", [2**32, 1])
@pytest.mark.parametrize("readers", [1, 2, 3, 5])
@pytest.mark.parametrize("writers", [1, 2, 4])
def test_any_ranks_read_what_any_ranks_wrote(tmp_path, monkeypatch, piece_elements, writers, readers, file_bytes):
    """Every element, whatever the two numbers, pieces and files: whole tensors, and the ranges of each reader."""
    monkeypatch.setattr(shards, "FILE_BYTES", file_bytes)
    for rank in range(writers):
        names = write(str(tmp_path), f"rank-{rank}", pieces_of(rank, writers), SHAPES)
        assert all((tmp_path / name).exists() for name in names) and (len(names) > 1) == (file_bytes == 1)
    with Shards(str(tmp_path)) as found:
        assert found.shapes == SHAPES
        for name, tensor in TENSORS.items():
            whole = found.whole("master", name)
            assert whole.dtype == tensor.dtype and torch.equal(whole, tensor)
            assert found.kinds(name) == ["master", "step"]
            assert found.is_scalar("step", name) and not found.is_scalar("master", name)
            assert found.scalar("step", name).item() == 3.0
            for rank in range(readers):
                size = -(-tensor.numel() // readers)
                mine = tensor.view(-1)[rank * size:(rank + 1) * size]
                flat = torch.full_like(mine, -1)
                found.read_into(flat, "master", name, rank * size)
                assert torch.equal(flat, mine)


def test_what_is_not_there_is_an_error(tmp_path):
    """A rank's file that is missing, another model's tensor, a folder without shards: never a half-filled tensor."""
    with pytest.raises(RuntimeError, match="no shards in"):
        Shards(str(tmp_path))
    for rank in range(2):
        write(str(tmp_path), f"rank-{rank}", pieces_of(rank, 2), SHAPES)
    os.remove(tmp_path / "rank-1-0.safetensors")
    with Shards(str(tmp_path)) as found:
        with pytest.raises(RuntimeError, match="no element 4 of master of a, of 0 to 7"):
            found.whole("master", "a")
        with pytest.raises(RuntimeError, match="no master of e: was it written by a run of another model"):
            found.read_into(torch.zeros(3), "master", "e", 0)


def test_a_rank_without_pieces_has_a_file(tmp_path):
    """So that a missing file is always a fault."""
    assert write(str(tmp_path), "rank-3", [], SHAPES) == ["rank-3-0.safetensors"]
    with Shards(str(tmp_path)) as found:
        assert found.shapes == SHAPES


@pytest.mark.parametrize("chunk_bytes", [2**30, 128, 1])
def test_host_copies_stay_as_they_were(tmp_path, monkeypatch, chunk_bytes):
    """What changes after the copy is not in it; the second copy goes into the memory of the first, also where it has
    more pieces than that had."""
    monkeypatch.setattr(shards, "CHUNK_BYTES", chunk_bytes)
    buffers = HostBuffers(pinned=False)
    tensors = [torch.arange(50.0), torch.arange(3, dtype=torch.bfloat16), torch.tensor(7.0), torch.arange(90.0)]

    def pieces(count):
        return [Piece("master", str(number), 0, tensor) for number, tensor in enumerate(tensors[:count])]

    first = buffers.copy(pieces(3))
    wanted = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.add_(1)
    assert all(torch.equal(piece.tensor, want) for piece, want in zip(first, wanted))
    names = write(str(tmp_path), "rank-0", first, {"0": (50,), "1": (3,), "2": ()})
    assert names == ["rank-0-0.safetensors"]
    second = buffers.copy(pieces(4))
    assert [piece.tensor.data_ptr() for piece in second[:3]] == [piece.tensor.data_ptr() for piece in first]
    assert all(torch.equal(piece.tensor, tensor) for piece, tensor in zip(second, tensors, strict=True))
    with Shards(str(tmp_path)) as found:
        assert torch.equal(found.whole("master", "0"), wanted[0])
