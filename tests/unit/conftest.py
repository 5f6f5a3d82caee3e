"""Shared by the unit tests: tiny real models, a real mesh of one rank, completions by hand."""

import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spmd_rl.batch import Completion
from spmd_rl.config import MeshConfig
from spmd_rl.mesh import Mesh

SIZES = dict(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=320,
             intermediate_size=48, tied=True)
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """A test starts as plain python does, also where the tests themselves were started by a launcher."""
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def tokenizer(make_model):
    """Byte-level: one id a byte, pad 256, EOS 257, no BOS."""
    return make_model.make_tokenizer(SIZES["vocab_size"])


@pytest.fixture(scope="session")
def model_folder(make_model, tokenizer, tmp_path_factory):
    """A function from (family, tied, fields of the Transformers config) to a saved folder, made once each."""
    made = {}

    def folder(family="qwen3", **fields):
        key = (family, repr(sorted(fields.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(family)
            make_model.save(made[key], make_model.build_model(family, **(SIZES | fields)), tokenizer)
        return str(made[key])

    return folder


@pytest.fixture
def mesh():
    """A mesh of one rank with its process group, and an unchanged environment after it."""
    environment = dict(os.environ)
    mesh = Mesh(MeshConfig(device="cpu"), tensor_parallel_size=1, seed=0)
    yield mesh
    mesh.close()
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def completion():
    """A function that makes a Completion from what matters to a test."""

    def make(token_ids, prompt_ids=(5,), advantage=0.0, group=0, sample=0, logprobs=None, **fields):
        logprobs = [-1.0] * len(token_ids) if logprobs is None else logprobs
        return Completion(group=group, sample=sample, prompt_ids=list(prompt_ids), token_ids=list(token_ids),
                          sampler_logprobs=list(logprobs), finish_reason="stop", version=0,
                          **(dict(advantage=advantage) | fields))

    return make


@pytest.fixture
def close():
    """A function that asserts: largest difference over the expected tensor's largest magnitude (at least 1)."""

    def check(actual, expected, tolerance):
        actual, expected = torch.as_tensor(actual).double(), torch.as_tensor(expected).double()
        assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        if expected.numel():
            error = (actual - expected).abs().max() / max(1.0, float(expected.abs().max()))
            assert error <= tolerance, f"off by {float(error):.3g}, tolerance {tolerance:g}"

    return check


class LargestTensor(TorchDispatchMode):
    """Notes the most elements of any tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.numel())
        return result


@pytest.fixture
def largest_tensor():
    """The class above: tests are no package, and cannot import from here."""
    return LargestTensor
