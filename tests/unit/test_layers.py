"""Compiled element-wise layers give what the plain ones give, with one compilation for rows of every size."""

import sys

import pytest
import torch

from spmd_rl import layers
from spmd_rl.attention import num_compilations
from spmd_rl.batch import pack
from spmd_rl.config import ModelConfig
from spmd_rl.model import build, load_hf_config

FAMILIES = ["qwen3", "qwen2", "llama", "gemma3"]


@pytest.fixture
def plain_compiler(monkeypatch):
    """No code generation: what is compared is what was captured, and how often."""
    monkeypatch.setattr(layers, "BACKEND", "aot_eager")
    layers._compiled.cache_clear()
    torch._dynamo.reset()
    yield
    layers._compiled.cache_clear()


def restored_rotary(model):
    """The architecture's own function again: the replaced one serves every model of this process."""
    names = vars(sys.modules[type(model.lm).__module__])
    assert isinstance(names["apply_rotary_pos_emb"], layers.functools.partial)
    names["apply_rotary_pos_emb"] = names["apply_rotary_pos_emb"].args[0]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_plain_layers(plain_compiler, model_folder, completion, close, family, checkpointing):
    """Log-probs and every gradient to 1e-6, and no compilation after the first row and a second one of another size."""
    config = ModelConfig(path=model_folder(family), dtype="float32")
    found = []
    counts = []
    for is_compiled in (False, True):
        model = build(config, load_hf_config(config), 1.0).train()
        if is_compiled:
            layers.compile_layers(model.lm)
            kinds = [m for m in model.lm.modules() if type(m).__name__.endswith(("RMSNorm", "MLP"))]
            assert len(kinds) > 4 and all("forward" in vars(m) for m in kinds)
        if checkpointing:
            model.lm.gradient_checkpointing_enable({"use_reentrant": False})
        for size in (20, 33, 50, 7):
            mb = pack([completion([5 + i for i in range(size)], prompt_ids=[1, 2, 3])], torch.device("cpu"))
            logprobs, _ = model(mb.input_ids_S, mb.positions_S, mb.segments_3S, mb.target_index_N, mb.target_ids_N, 1.0)
            logprobs.sum().backward()
            counts.append(num_compilations())
            found.append(logprobs.detach())
        found += [p.grad for p in model.parameters()]
    restored_rotary(model)
    half = len(found) // 2
    for got, want in zip(found[half:], found[:half], strict=True):
        close(got, want, 1e-6)
    assert counts[4] > counts[3]  # the compiled model's first row
    assert counts[7] == counts[4]


class Scaled(torch.nn.Module):
    """A gated MLP that also weighs its gate, as Falcon-H1's does."""

    def __init__(self, scale):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (torch.nn.Linear(4, 4) for _ in range(3))
        self.act_fn, self.scale = torch.nn.SiLU(), scale

    def forward(self, x):
        return self.down_proj(self.up_proj(x) * self.act_fn(self.gate_proj(x) * self.scale))


class Squared(Scaled):
    """One that reads nothing else, and computes something else."""

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) ** 2)


class Doubled(Scaled):
    """One whose projections are its own, and that goes on after them."""

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * 2


class GatedRMSNorm(torch.nn.RMSNorm):
    """A norm of two inputs, as hybrid models have them."""

    def forward(self, x, gate=None):
        return super().forward(x) * (1 if gate is None else gate)


@pytest.mark.parametrize("layer", [Scaled(2.0), Squared(1.0), Doubled(1.0), GatedRMSNorm(4)])
def test_what_computes_something_else_stays(layer):
    """A layer with the names of ours and another formula would be trained on wrong numbers, without an error."""
    x = torch.randn(1, 3, 4)
    want = layer(x)
    layers.compile_layers(torch.nn.Sequential(layer))
    assert "forward" not in vars(layer) and layer(x).equal(want)


def test_other_rotary_functions_stay(monkeypatch):
    """Only the one form that all of the tested families have is replaced, and only once."""
    def scaled(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        return q, k

    monkeypatch.setattr(sys.modules[__name__], "apply_rotary_pos_emb", scaled, raising=False)
    layers.compile_layers(Scaled(1.0))
    assert vars(sys.modules[__name__])["apply_rotary_pos_emb"] is scaled
