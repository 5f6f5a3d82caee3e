"""Ranks: how a list is split, what a launcher may say, and what stays as it was around a foreign library."""

import os
import random
import socket

import numpy as np
import pytest
import torch

from spmd_rl.config import ConfigError, MeshConfig
from spmd_rl.mesh import (Mesh, Ranks, be_deterministic, check_device, free_port, host_identity,
                          preserved_process_state, say_once, seed_everything, shared_gpus, split)

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def set_variables(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [0, 1, 6, 7, 20])
def test_split_keeps_order_and_evens_sizes(size, parts):
    """Neighbouring parts, laid end to end the list itself; sizes differ by one at most, the larger first."""
    items = list(range(size))
    found = split(items, parts)
    assert len(found) == parts
    assert [i for part in found for i in part] == items
    sizes = [len(part) for part in found]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_split_of_engines_then_ranks_is_in_rank_order():
    """Parts for 2 engines, split again over 2 ranks each, are what gathering in rank order lays end to end."""
    items = list(range(11))
    found = [part for engine in split(items, 2) for part in split(engine, 2)]
    assert [i for part in found for i in part] == items


def test_plain_python_is_one_rank():
    """No variable of a launcher is rank 0 of 1."""
    assert Ranks.from_environment() == Ranks(0, 1, 0)


@pytest.mark.parametrize("leftover", [{"MASTER_PORT": "29500"}, {"MASTER_ADDR": "h", "MASTER_PORT": "1"},
                                      {"WORLD_SIZE": "1"}])
def test_leftovers_that_say_nothing_of_ranks_are_plain_python(monkeypatch, leftover):
    """An address alone, or a world of one, starts one rank."""
    set_variables(monkeypatch, leftover)
    assert Ranks.from_environment() == Ranks(0, 1, 0)


def test_a_launchers_variables_are_taken(monkeypatch):
    """torchrun's variables are read as they are; so is a torchrun of one process."""
    set_variables(monkeypatch, LAUNCHED)
    assert Ranks.from_environment() == Ranks(1, 4, 1)
    set_variables(monkeypatch, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    assert Ranks.from_environment() == Ranks(0, 1, 0)


@pytest.mark.parametrize("missing", LAUNCHED)
def test_a_part_of_the_variables_is_refused_with_the_missing_ones(monkeypatch, missing):
    """Without one of them a rank would take a default, and wait for ever or believe that it is alone."""
    set_variables(monkeypatch, {k: v for k, v in LAUNCHED.items() if k != missing})
    with pytest.raises(ConfigError, match=missing):
        Ranks.from_environment()


def test_a_world_size_alone_is_refused(monkeypatch):
    """World size 2 but no rank: every process would be rank 0."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="RANK"):
        Ranks.from_environment()


@pytest.mark.parametrize("wrong", [{"RANK": "4"}, {"RANK": "-1"}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": "0"},
                                   {"LOCAL_RANK": "-1"}, {"LOCAL_RANK": "4"}, {"LOCAL_RANK": "7"}, {"RANK": "one"},
                                   {"WORLD_SIZE": ""}, {"LOCAL_RANK": "0.5"}])
def test_variables_that_contradict_each_other_are_refused(monkeypatch, wrong):
    """A rank outside of the world, or no number at all: ConfigError with the variable's name."""
    set_variables(monkeypatch, LAUNCHED | wrong)
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Ranks.from_environment()


def test_a_mesh_of_one_rank(mesh):
    """One rank has everything, is the writer, and its collectives return what it gave."""
    assert (mesh.world_size, mesh.num_engines, mesh.engine_index, mesh.engine_rank) == (1, 1, 0, 0)
    assert mesh.device == torch.device("cpu")
    items = [3, 1, 2]
    for share in (mesh.share, mesh.engine_share, mesh.rank_share_of_engine):
        assert list(share(items)) == items
    assert mesh.on_main(lambda: ["writer"]) == ["writer"]
    assert mesh.mine(["a"]) == "a"
    assert mesh.all_gather({"x": 1}) == [{"x": 1}]
    assert mesh.gather_lists((1, 2)) == [1, 2]
    assert (mesh.all_true(True), mesh.all_true(False)) == (True, False)
    mesh.barrier()
    mesh.leave_together()
    assert torch.distributed.is_initialized()
    mesh.close()
    mesh.close()  # twice is no error: an engine may have taken the groups with it
    assert not torch.distributed.is_initialized()


def test_mine_wants_an_entry_a_rank(mesh):
    """A list of another length is a wrong plan, not a shorter one."""
    with pytest.raises(AssertionError, match="2 parts for 1 ranks"):
        mesh.mine(["a", "b"])


def test_a_mesh_seeds_the_generators(mesh):
    """The run's seed plus the rank: seed 0 on rank 0."""
    drawn = random.random(), np.random.rand(), torch.rand(1).item()
    seed_everything(0)
    assert drawn == (random.random(), np.random.rand(), torch.rand(1).item())
    seed_everything(1)
    assert drawn[0] != random.random()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_cuda_device_that_is_not_there_is_refused():
    """Asking for CUDA without a GPU names the way out."""
    with pytest.raises(ConfigError, match="mesh.device cpu"):
        Mesh(MeshConfig(device="cuda"), 1, 0)


@pytest.mark.parametrize("launched, refused", [
    ({}, "8 GPUs and runs 1 rank: .*--nproc_per_node 8.*CUDA_VISIBLE_DEVICES=0"),
    (LAUNCHED | {"LOCAL_WORLD_SIZE": "2"}, "8 GPUs and runs 2 ranks: .*CUDA_VISIBLE_DEVICES=0,1"),
    (LAUNCHED | {"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "8"}, None),
    (LAUNCHED, None),  # a launcher that does not say how many ranks a host has
    (LAUNCHED | {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "9"}, "LOCAL_RANK is 9 but this host shows 8 GPUs"),
])
def test_case_70_ranks_that_are_not_the_hosts_gpus_are_refused(monkeypatch, launched, refused):
    """More ranks than GPUs, or fewer: with both numbers and what to start. On CPUs any number is right."""
    set_variables(monkeypatch, launched)
    check_device(MeshConfig(device="cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    if refused is None:
        check_device(MeshConfig())
    else:
        with pytest.raises(ConfigError, match=refused):
            check_device(MeshConfig())


@pytest.mark.parametrize("seen, said", [
    ([("a", "x"), ("a", "y"), ("b", "x"), ("b", "y")], None),  # the same name on another host is another GPU
    ([("a", None), ("a", None)], None),  # CPU ranks
    ([("a", "x"), ("b", "x"), ("a", "x"), ("a", "z"), ("a", "x")], "ranks 0, 2, 4 have GPU x of one host"),
])
def test_a_gpu_of_two_ranks_is_named(seen, said):
    """Each rank has a GPU of its own."""
    found = shared_gpus(seen)
    assert found is None if said is None else said in found


def draw_all():
    return random.random(), float(np.random.rand()), torch.rand(3).tolist()


@pytest.mark.parametrize("fails", [False, True])
def test_case_23_process_state_is_the_same_after_a_foreign_library(monkeypatch, fails):
    """Generators, environment, thread count, its setter and the default dtype are as before the block, also after
    an error in it.

    A library that seeds with 0, or puts a function that does nothing for torch.set_num_threads, changes all later
    draws and speeds.
    """
    monkeypatch.setenv("SPMD_TEST_CHANGED", "before")
    monkeypatch.setenv("SPMD_TEST_REMOVED", "before")
    threads, setter = torch.get_num_threads(), torch.set_num_threads
    seed_everything(5)
    expected = draw_all()
    seed_everything(5)
    try:
        with preserved_process_state():
            seed_everything(0)
            draw_all()
            os.environ.update(SPMD_TEST_CHANGED="after", SPMD_TEST_NEW="after", LOCAL_WORLD_SIZE="1")
            del os.environ["SPMD_TEST_REMOVED"]
            torch.set_num_threads(threads + 1)
            torch.set_num_threads = lambda n: None
            torch.set_default_dtype(torch.float64)
            if fails:
                raise RuntimeError("inside")
    except RuntimeError:
        assert fails
    assert draw_all() == expected
    assert os.environ["SPMD_TEST_CHANGED"] == os.environ["SPMD_TEST_REMOVED"] == "before"
    assert "SPMD_TEST_NEW" not in os.environ and "LOCAL_WORLD_SIZE" not in os.environ
    assert torch.set_num_threads is setter
    assert torch.get_num_threads() == threads
    assert torch.get_default_dtype() == torch.float32


def test_a_free_port_can_be_bound():
    """The port is free when it is handed out."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))


def test_host_identity_is_one_for_a_machine():
    """Two looks at one machine agree, and it is not empty."""
    assert host_identity() == host_identity() != ""


@pytest.mark.parametrize("rank, shown", [(None, "hello\n"), ("0", "hello\n"), ("1", "")])
def test_say_once_speaks_on_the_first_rank(monkeypatch, capsys, rank, shown):
    """One line for the run, not one a rank."""
    if rank:
        monkeypatch.setenv("RANK", rank)
    say_once("hello")
    assert capsys.readouterr().out == shown


def test_deterministic_kernels_leave_new_tensors_alone(monkeypatch):
    """They are on, with the workspace that cuBLAS needs for it, and `torch.empty` is not filled with NaN: an engine
    computes over padding that nobody wrote."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        be_deterministic()
        assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        kept = torch.full((1000,), 3.0)
        address = kept.data_ptr()
        del kept
        again = torch.empty(1000)
        assert again.data_ptr() != address or not bool(again.isnan().any())
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
