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


class Gated(torch.nn.Module):
    """An MLP with the parts of those that are compiled."""

    def __init__(self, act_fn=None):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (torch.nn.Linear(4, 4) for _ in range(3))
        self.act_fn, self.scale = act_fn or torch.nn.SiLU(), 2.0

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Scaled(Gated):
    """Falcon-H1's, which weighs its gate."""

    def forward(self, x):
        return self.down_proj(self.up_proj(x) * self.act_fn(self.gate_proj(x) * self.scale))


class Clamped(Gated):
    """One that differs for large values only."""

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=7)) * self.up_proj(x))


class Doubled(Gated):
    """One that goes on after its projections."""

    def forward(self, x):
        return super().forward(x) * 2


class Residual(Gated):
    """One of two inputs."""

    def forward(self, x, residual=None):
        return super().forward(x) + (0 if residual is None else residual)


class GatedRMSNorm(torch.nn.RMSNorm):
    """A norm of two inputs, as hybrid models have them."""

    def forward(self, x, gate=None):
        return super().forward(x) * (1 if gate is None else gate)


def with_own_forward(layer):
    layer.forward = torch.tanh
    return layer


@pytest.mark.parametrize("layer", [
    Scaled(), Clamped(), Doubled(), Residual(), GatedRMSNorm(4), Gated(torch.nn.functional.silu),
    with_own_forward(Gated()), with_own_forward(torch.nn.RMSNorm(4))], ids=lambda layer: type(layer).__name__)
def test_what_computes_something_else_stays(layer):
    """A layer with the names of ours and another formula would be trained on wrong numbers, without an error."""
    x = 100 * torch.randn(1, 3, 4)
    before, want = vars(layer).get("forward"), layer(x)
    layers.compile_layers(torch.nn.Sequential(layer, taken := Gated()))
    assert vars(layer).get("forward") is before and layer(x).equal(want) and "forward" in vars(taken)


def heads_last(q, k, cos, sin, unsqueeze_dim=2):
    return q, k


def with_positions(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    return q, k


@pytest.mark.parametrize("rotary", [heads_last, with_positions])
def test_other_rotary_functions_stay(monkeypatch, rotary):
    """Only the one form that all of the tested families have is replaced."""
    monkeypatch.setattr(sys.modules[__name__], "apply_rotary_pos_emb", rotary, raising=False)
    layers.compile_layers(Gated())
    assert vars(sys.modules[__name__])["apply_rotary_pos_emb"] is rotary


def test_the_rotary_function_serves_others(plain_compiler, model_folder):
    """It is replaced once for all models of a module in the process, and one of them that somebody else compiles as a
    whole, vLLM with its Transformers backend, still can be."""
    config = ModelConfig(path=model_folder("llama"), dtype="float32")
    ours, others = (build(config, load_hf_config(config), 1.0) for _ in range(2))
    for _ in range(2):
        layers.compile_layers(ours.lm)
    names = vars(sys.modules[type(ours.lm).__module__])
    assert not isinstance(names["apply_rotary_pos_emb"].args[0], layers.functools.partial)
    tokens = torch.arange(5, 25)[None]
    others.lm.set_attn_implementation("sdpa")
    want = others.lm.base_model(tokens, use_cache=False).last_hidden_state
    whole = torch.compile(others.lm.base_model, fullgraph=True, backend="aot_eager")
    got = whole(tokens, use_cache=False).last_hidden_state
    restored_rotary(ours)
    assert (got - want).abs().max() < 1e-5
