"""The model: what is refused by name, and that a packed row gives the log-probs and gradients of plain forwards."""

import copy
import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from spmd_rl.batch import pack
from spmd_rl.config import ConfigError, ModelConfig
from spmd_rl.model import LogprobModel, _restore_buffers, build, load_hf_config, read_weights, weight_files

FAMILIES = ["qwen3", "qwen2", "llama", "gemma3"]
VOCABULARY = 320
TINY = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, intermediate_size=16,
            vocab_size=64)

# Model type, fields that make it so -> the word that names it.
REFUSED = {
    "mixtral": (dict(num_local_experts=4), "mixture-of-experts"),
    "qwen3_moe": (dict(num_experts=4), "mixture-of-experts"),
    "deepseek_v3": (dict(n_routed_experts=4), "mixture-of-experts"),
    "qwen2_5_vl": (dict(), "vision"),
    "gemma2": (dict(attn_logit_softcapping=50.0, final_logit_softcapping=None), "attention soft-capping"),
    "gemma3_text": (dict(final_logit_softcapping=30.0), "soft-capping of the logits"),
    "cohere": (dict(logit_scale=0.0625), "scaled logits"),
    "granite": (dict(logits_scaling=8.0), "scaled logits"),
    "t5": (dict(), "encoder-decoder"),
    "bart": (dict(), "encoder-decoder"),
    "qwen3_next": (dict(layer_types=["linear_attention", "full_attention"], num_experts=0), "linear_attention"),
    "llama": (dict(quantization_config={"quant_method": "fp8"}), "quantised"),
    # State-space, convolution and recurrent layers would carry one sequence's state into the next.
    "mamba": (dict(), "linear_attention|MambaForCausalLM"),
    "mamba2": (dict(num_heads=2, head_dim=16, n_groups=1), "linear_attention|Mamba2ForCausalLM"),
    "jamba": (dict(num_experts=1), "linear_attention|JambaForCausalLM"),
    "falcon_h1": (dict(), "FalconH1ForCausalLM|hybrid"),
    "lfm2": (dict(layer_types=["conv", "full_attention"]), "conv"),
    "recurrent_gemma": (dict(), "RecurrentGemmaForCausalLM|recurrent"),
    "bamba": (dict(mamba_n_heads=2), "linear_attention|BambaForCausalLM"),
    "zamba2": (dict(), "linear_attention|hybrid|Zamba2ForCausalLM"),
}


def save_config(folder, model_type, fields):
    AutoConfig.for_model(model_type, **fields).save_pretrained(folder)
    return ModelConfig(path=str(folder))


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_is_not_supported_is_refused_by_name(tmp_path, model_type):
    """Decision 11: before any weight is read, with the folder and what it is. True equals 1.0, and must not pass."""
    fields, word = REFUSED[model_type]
    sizes = {} if model_type in ("t5", "bart", "qwen2_5_vl", "zamba2") else TINY
    with pytest.raises(ConfigError, match=word) as error:
        load_hf_config(save_config(tmp_path, model_type, sizes | fields))
    assert "model.path" in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.parametrize("model_type, fields", [
    ("qwen3", {}), ("qwen2", {}), ("llama", {}), ("gemma3_text", {}), ("granite", dict(logits_scaling=1.0)),
    ("gemma2", dict(attn_logit_softcapping=None, final_logit_softcapping=None)),
    ("qwen2", dict(use_sliding_window=True, sliding_window=8, max_window_layers=1))])
def test_what_is_supported_passes(tmp_path, model_type, fields):
    """Fields that ask for nothing (absent, None, 1.0) are no reason to refuse."""
    assert load_hf_config(save_config(tmp_path, model_type, TINY | fields)).model_type == model_type


@pytest.mark.parametrize("kind", ["absent", "empty", "broken"])
def test_a_folder_without_config_is_refused(tmp_path, kind):
    """ConfigError with the path, and no look at any hub."""
    folder = tmp_path / "model"
    if kind != "absent":
        folder.mkdir()
    if kind == "broken":
        (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="model.path"):
        load_hf_config(ModelConfig(path=str(folder)))


def test_a_bias_in_the_output_projection_is_refused():
    """The head would drop it."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("phi", **TINY))
    with pytest.raises(ConfigError, match="PhiForCausalLM has a bias"):
        LogprobModel(model, 1.0)


# Packed rows. ---------------------------------------------------------------------------------------------------------

LENGTHS = [(3, 9), (20, 30), (1, 1), (10, 4)]  # gemma3's window is 32: 50 tokens go beyond it


def sequences(completion):
    g = torch.Generator().manual_seed(1)
    made = []
    for prompt, length in LENGTHS:
        ids = torch.randint(VOCABULARY, (prompt + length,), generator=g).tolist()
        made.append(completion(ids[prompt:], prompt_ids=ids[:prompt]))
    return made


def plain_logprobs(model, c, temperature):
    """Log-probs of a completion by the model's own forward of it alone, all logits at once."""
    logits = model(torch.tensor([c.prompt_ids + c.token_ids])).logits[0, len(c.prompt_ids) - 1:-1]
    logprobs = (logits.float() / temperature).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(c.token_ids)[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def load_both(folder, memory_gib=1.0):
    config = ModelConfig(path=folder, dtype="float32")
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return build(config, load_hf_config(config), memory_gib), plain


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_has_the_logprobs_and_gradients_of_plain_forwards(model_folder, completion, close, family, tied,
                                                                       temperature):
    """Log-probs and entropy to 1e-5, and every parameter's gradient, of one packed row against the model's own
    forward of each sequence alone: positions, masks, windows, scales, and both gradients of a tied weight.
    """
    model, plain = load_both(model_folder(family, tied=tied), memory_gib=1e-9)  # the smallest tiles
    row = sequences(completion)
    mb = pack(row, torch.device("cpu"), block=64)
    logprobs_N, entropy_N = model(mb.input_ids_S, mb.positions_S, mb.segments_3S, mb.target_index_N,
                                  mb.target_ids_N, temperature)
    found = [plain_logprobs(plain, c, temperature) for c in row]
    expected_N = torch.cat([logprobs for logprobs, _ in found])
    close(logprobs_N.detach(), expected_N.detach(), 1e-5)
    close(entropy_N, torch.cat([entropy for _, entropy in found]).detach(), 1e-5)
    weights = torch.randn(len(expected_N), generator=torch.Generator().manual_seed(2)) / 10
    (logprobs_N * weights).sum().backward()
    (expected_N * weights).sum().backward()
    ours, theirs = dict(model.lm.named_parameters()), dict(plain.named_parameters())
    assert ours.keys() == theirs.keys() and tied == ("lm_head.weight" not in ours)
    for name, parameter in theirs.items():
        close(ours[name].grad, parameter.grad, 1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "qwen3"])
def test_case_15_no_place_in_a_row_moves_a_logprob(completion, tmp_path, kind):
    """Absolute and rotary positions: a sequence alone, behind others, in front of filler and in a row of its own kind
    has the same log-probs to 1e-5, those of its padded row with positions given; positions count within a sequence.

    By its place in the row a GPT-2 would give it others, by more than 0.1.
    """
    sizes = dict(n_embd=16, n_layer=2, n_head=2, n_positions=64, vocab_size=64) if kind == "gpt2" else TINY
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, initializer_range=0.3, **sizes)).eval()
    plain.save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), dtype="float32")
    model = build(config, load_hf_config(config), 1.0)
    mine, other = completion([6, 7, 8], prompt_ids=[5]), completion([9] * 7, prompt_ids=[3, 4])

    def logprobs(row, block=1, shift=0):
        mb = pack(row, torch.device("cpu"), block=block)
        with torch.no_grad():
            found, _ = model(mb.input_ids_S, mb.positions_S + shift, mb.segments_3S, mb.target_index_N,
                             mb.target_ids_N, 1.0)
        return found[mb.sequence_N == row.index(mine)]

    ids = torch.tensor([[0] * 3 + [5, 6, 7, 8]])
    with torch.no_grad():
        padded = plain(input_ids=ids, attention_mask=torch.tensor([[0] * 3 + [1] * 4]),
                       position_ids=torch.tensor([[0] * 3 + [0, 1, 2, 3]])).logits.log_softmax(-1)
    expected = torch.stack([padded[0, place, token] for place, token in ((3, 6), (4, 7), (5, 8))])
    for row, block in (([mine], 1), ([other, mine], 1), ([mine, other], 32), ([other, other, mine, other], 16)):
        assert (logprobs(row, block) - expected).abs().max() < 1e-5
    if kind == "gpt2":
        assert (logprobs([mine], shift=9) - expected).abs().max() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_changes_no_gradient(model_folder, completion, family):
    """Blocks computed again in backward see the row's segments too."""
    model, _ = load_both(model_folder(family))
    mb = pack(sequences(completion), torch.device("cpu"))
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            model.lm.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        model.train()
        model(mb.input_ids_S, mb.positions_S, mb.segments_3S, mb.target_index_N, mb.target_ids_N,
              1.0)[0].sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_without_targets_gives_every_parameter_a_gradient_of_zero(model_folder, family, tied):
    """A dummy row's backward reaches every parameter with exactly 0, so that ranks reduce the same tensors."""
    model, _ = load_both(model_folder(family, tied=tied))
    mb = pack([], torch.device("cpu"))
    logprobs_N, _ = model(mb.input_ids_S, mb.positions_S, mb.segments_3S, mb.target_index_N, mb.target_ids_N, 1.0)
    assert logprobs_N.shape == (0,)
    logprobs_N.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


def test_case_75_the_models_temperature_is_the_samplers(model_folder, completion):
    """At 0.5 the log-probs are those of logits / 0.5: not the raw ones, and not the raw ones divided."""
    model, plain = load_both(model_folder("qwen3"))
    row = sequences(completion)[:1]
    mb = pack(row, torch.device("cpu"))
    fields = mb.input_ids_S, mb.positions_S, mb.segments_3S, mb.target_index_N, mb.target_ids_N
    with torch.no_grad():
        found, raw = model(*fields, 0.5)[0], model(*fields, 1.0)[0]
        expected = plain_logprobs(plain, row[0], 0.5)[0]
    assert (found - expected).abs().max() < 1e-5
    assert (found - raw).abs().max() > 0.1 and (found - raw / 0.5).abs().max() > 0.1


# Weights and buffers. -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_are_those_of_a_plain_load(model_folder, family):
    """Buffers that came out in the weights' type, or with other values, are made as a plain load has them, bit for bit.

    Rotary frequencies in bf16 are off by 0.2 %.
    """
    path = model_folder(family)
    config = ModelConfig(path=path, dtype="bfloat16")
    hf_config = load_hf_config(config)
    right = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    spoilt = copy.deepcopy(right)
    for module in spoilt.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[key] = torch.full_like(buffer, 7.0, dtype=torch.bfloat16)
    _restore_buffers(spoilt, config, hf_config)
    expected = dict(right.named_buffers())
    assert expected, "no buffer: the test looks at nothing"
    for name, buffer in spoilt.named_buffers():
        assert buffer.dtype == expected[name].dtype and torch.equal(buffer, expected[name]), name


def spoil(folder, target, change):
    """A copy of a model folder with its tensors changed."""
    os.makedirs(target)
    for name in os.listdir(folder):
        if name.endswith(".json"):
            with open(os.path.join(folder, name)) as source, open(os.path.join(target, name), "w") as copied:
                copied.write(source.read())
    tensors = load_file(os.path.join(folder, "model.safetensors"))
    change(tensors)
    save_file(tensors, os.path.join(target, "model.safetensors"), metadata={"format": "pt"})
    return ModelConfig(path=str(target), dtype="float32")


@pytest.mark.parametrize("change, word", [
    (lambda t: t.pop("model.norm.weight"), "missing .*model.norm.weight"),
    (lambda t: t.update({"model.extra.weight": torch.ones(2)}), "unexpected .*model.extra.weight"),
    (lambda t: t.update({"model.odd.weight": t.pop("model.norm.weight")}), "missing .*model.norm.weight")])
def test_a_folder_with_other_names_is_refused(model_folder, tmp_path, change, word):
    """A weight that is missing would be random, one too many ignored: neither in silence."""
    config = spoil(model_folder("qwen3"), tmp_path / "model", change)
    with pytest.raises(ConfigError, match=word):
        build(config, load_hf_config(config), 1.0)


def test_weights_are_found_in_one_file_or_by_the_index(model_folder, tmp_path):
    """Tensor name -> file, and the tensors in the order that is asked for."""
    folder = model_folder("qwen3")
    single = weight_files(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    several = weight_files(str(tmp_path))
    assert len(set(several.values())) > 1 and several.keys() == single.keys()
    order = sorted(single, reverse=True)
    for (name, a), (other, b) in zip(read_weights(single, order), read_weights(several, order), strict=True):
        assert name == other and torch.equal(a, b)


def test_a_folder_without_safetensors_is_refused(tmp_path):
    """Pickled weights are not read."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match="model.safetensors"):
        weight_files(str(tmp_path))


@pytest.mark.parametrize("model_type, shares", [
    ("seed_oss", dict(residual_dropout=0.5, attention_dropout=0.5, head_dim=8)),
    ("gpt_neox", dict(hidden_dropout=0.5, attention_dropout=0.5))])
def test_no_dropout_is_left(completion, tmp_path, model_type, shares):
    """Neither in modules nor in functions with a share of their own: the sampler has none, and log-probs in training
    are those of scoring."""
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **TINY | shares)).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), dtype="float32")
    model = build(config, load_hf_config(config), 1.0)
    mb = pack([completion(list(range(5, 25)), prompt_ids=[1, 2, 3])], torch.device("cpu"))
    found = [model.train(training)(mb.input_ids_S, mb.positions_S, mb.segments_3S, mb.target_index_N, mb.target_ids_N,
                                   1.0)[0] for training in (False, True)]
    assert found[0].equal(found[1])
