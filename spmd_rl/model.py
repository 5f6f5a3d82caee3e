"""The language model as the policy and the reference use it: which are supported, how weights are read,
and a wrapper that returns log-probs of packed rows in place of logits."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.logging import disable_progress_bar

from spmd_rl import attention
from spmd_rl.config import ConfigError, ModelConfig
from spmd_rl.flops import ModelShape
from spmd_rl.logprobs import LogprobHead

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

# A field of a Transformers config that asks for what is not here -> what it is.
UNSUPPORTED = {
    "num_experts": "mixture-of-experts models",
    "num_local_experts": "mixture-of-experts models",
    "n_routed_experts": "mixture-of-experts models",
    "vision_config": "vision models",
    "audio_config": "audio models",
    "is_encoder_decoder": "encoder-decoder models",
    "attn_logit_softcapping": "attention soft-capping",
    "final_logit_softcapping": "soft-capping of the logits",
    "logit_scale": "scaled logits",
    "logits_scaling": "scaled logits",
    "quantization_config": "quantised weights",
    "use_bidirectional_attention": "models without causal attention",
}
ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


def load_hf_config(config: ModelConfig) -> Any:
    """The folder's Transformers config. Raises ConfigError where there is none, or the model is not supported."""
    try:
        hf_config = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path is {config.path!r}: no model config can be loaded from it ({error})") from None
    for name, what in UNSUPPORTED.items():
        value = getattr(hf_config, name, None)
        if value is True or value not in (None, False, 0, 1.0):  # True equals 1.0
            raise ConfigError(f"model.path is {config.path!r}: {what} are not supported ({name} is {str(value):.40})")
    other = set(getattr(hf_config, "layer_types", None) or ATTENTION_LAYERS) - ATTENTION_LAYERS
    if other:
        raise ConfigError(f"model.path is {config.path!r}: layers of type {', '.join(sorted(other))} are not supported")
    if type(hf_config) in AutoModelForCausalLM._model_mapping and not config.trust_remote_code:
        model_class: Any = AutoModelForCausalLM._model_mapping[type(hf_config)]
        # Others compute attention by themselves, and sequences of one row would see each other.
        if not getattr(model_class, "_supports_attention_backend", False) or getattr(hf_config, "block_types", None):
            raise ConfigError(f"model.path is {config.path!r}: {model_class.__name__} does not take its attention from "
                              "Transformers' attention interface, which packed rows need")
    for name in _expert_counts(hf_config.to_dict()):
        raise ConfigError(f"model.path is {config.path!r}: mixture-of-experts models are not supported ({name})")
    return hf_config


def _expert_counts(tree: dict[str, Any]) -> list[str]:
    """Fields at any depth that ask for more than one expert."""
    found = []
    for key, value in tree.items():
        if isinstance(value, dict):
            found += _expert_counts(value)
        elif "expert" in str(key) and isinstance(value, int) and not isinstance(value, bool) and value > 1:
            found.append(f"{key} is {value}")
    return found


class LogprobModel(nn.Module):
    """A causal language model whose forward gives log-probs of the targets of one packed row."""

    lm: Any
    row_lengths: Sequence[int] = ()
    """Lengths that rows are filled up to where attention is compiled for each, rising."""

    def __init__(self, lm: Any, logprob_memory_gib: float) -> None:
        """lm: a Transformers causal model; its output projection is replaced by a LogprobHead on the same weight."""
        super().__init__()
        self.lm = lm
        output = lm.get_output_embeddings()
        if getattr(output, "bias", None) is not None:
            raise ConfigError(f"{type(lm).__name__} has a bias in its output projection: it is not supported")
        lm.set_output_embeddings(LogprobHead(output.weight, logprob_memory_gib))
        for module in lm.modules():
            # The sampler has no dropout: with it the policy that is trained is not the one that sampled.
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            for name, value in list(vars(module).items()):
                if "dropout" in name and isinstance(value, float):
                    setattr(module, name, 0.0)

    def forward(self, input_ids_S: Tensor, positions_S: Tensor, segments_3S: Tensor, target_index_N: Tensor,
                target_ids_N: Tensor, temperature: float, boundaries_B: Tensor | None = None,
                longest: int = 0) -> tuple[Tensor, Tensor]:
        """(logprobs_N, entropy_N) in fp32, both with gradient. Tensors as in MicroBatch."""
        hidden_1SH = self.lm.base_model(
            input_ids=input_ids_S[None], position_ids=positions_S[None], use_cache=False,
            packed=attention.PackedSegments(segments_3S, self.row_lengths, boundaries_B, longest)).last_hidden_state
        return self.lm.get_output_embeddings()(hidden_1SH[0, target_index_N], target_ids_N, temperature)


def shape(lm: Any) -> ModelShape:
    """What of a model its operations and its memory follow from, which may be on the meta device; at ZeRO stage 3 a
    parameter has its true size in ds_numel."""
    config = lm.config
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = {id(p): getattr(p, "ds_numel", p.numel()) for p in lm.parameters()}
    # Matrices of the blocks: the embedding is looked up, and the head counts by targets.
    outside = {id(m.weight) for m in (lm.get_input_embeddings(), lm.get_output_embeddings())}
    matrices = [p for p in lm.parameters() if len(getattr(p, "ds_shape", p.shape)) == 2 and id(p) not in outside]
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    # With a norm after it, the last product's result is needed in backward, and is not the last. Where neither is known
    # by its name, the recomputation counts as whole.
    ends = [block.mlp.down_proj.weight for block in _blocks(lm)
            if hasattr(getattr(block, "mlp", None), "down_proj") and not hasattr(block, "post_feedforward_layernorm")]
    return ModelShape(
        linear_parameters=sum(sizes[id(p)] for p in matrices), last_parameters=sum(sizes[id(p)] for p in ends),
        windows=tuple(config.sliding_window if kind == "sliding_attention" else None for kind in kinds),
        query_width=config.num_attention_heads * head_size,
        key_width=(getattr(config, "num_key_value_heads", None) or config.num_attention_heads) * head_size,
        vocabulary=config.vocab_size, hidden=config.hidden_size,
        intermediate=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,  # GPT-2 has no name for it
        num_parameters=sum(sizes.values()), largest_parameter=max(sizes.values()))


def _blocks(lm: Any) -> list[Any]:
    return [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]


def checkpoint_blocks(lm: Any, every: int) -> float:
    """Recompute every so-many-th block in backward; returns their share of all blocks."""
    lm.gradient_checkpointing_enable({"use_reentrant": False})
    blocks = _blocks(lm)
    for number, block in enumerate(blocks):
        block.gradient_checkpointing = number % every == 0
    return sum(block.gradient_checkpointing for block in blocks) / max(1, len(blocks))


def build(config: ModelConfig, hf_config: Any, logprob_memory_gib: float) -> LogprobModel:
    """The whole model with its weights, on the host. Raises ConfigError where the folder lacks one."""
    _prepare_transformers()
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        config.path, config=hf_config, dtype=DTYPES[config.dtype], attn_implementation=attention.NAME,
        trust_remote_code=config.trust_remote_code, output_loading_info=True)
    lm, info = loaded
    _refuse_other_names(config, info["missing_keys"], info["unexpected_keys"])
    for parameter in lm.parameters():
        if not parameter.untyped_storage().resizable():  # mapped from the file; memory of its own can be given away
            parameter.data = parameter.data.clone()
    return LogprobModel(lm, logprob_memory_gib)


def on_meta(config: ModelConfig, hf_config: Any) -> Any:
    """The Transformers model without memory, for its shapes."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(hf_config, dtype=DTYPES[config.dtype],
                                                trust_remote_code=config.trust_remote_code)


def build_sharded(config: ModelConfig, hf_config: Any, logprob_memory_gib: float,
                  shard_init: contextlib.AbstractContextManager, shard_index: int) -> LogprobModel:
    """The model whose parameters are split over the ranks from the first, never whole on a host.

    shard_init: DeepSpeed's zero.Init; shard_index: which shard this rank holds. It reads its own slice of
    each tensor from the mapped safetensors files and nothing else. Raises ConfigError where a weight is missing.
    """
    _prepare_transformers()
    with shard_init, no_init_weights():
        lm = AutoModelForCausalLM.from_config(
            hf_config, dtype=DTYPES[config.dtype], attn_implementation=attention.NAME,
            trust_remote_code=config.trust_remote_code)
    lm.tie_weights()  # no_init_weights leaves that out too
    _restore_buffers(lm, config, hf_config)
    files = weight_files(config.path)
    named = dict(lm.named_parameters())
    _refuse_other_names(config, sorted(named.keys() - files.keys()), sorted(files.keys() - named.keys()),
                        tied=hf_config.tie_word_embeddings)
    for name, whole in read_weights(files, list(named)):
        parameter = named[name]
        if tuple(whole.shape) != tuple(parameter.ds_shape):
            raise ConfigError(f"model.path is {config.path!r}: {name} has shape {tuple(whole.shape)} in the file and "
                              f"{tuple(parameter.ds_shape)} in the model")
        shard = parameter.ds_tensor.data
        start = shard_index * shard.numel()
        mine = whole.view(-1)[start:start + shard.numel()]  # the last rank's shard ends in padding
        shard.view(-1)[:mine.numel()].copy_(mine)
    drop_second_shards(named.values())
    return LogprobModel(lm, logprob_memory_gib)


def drop_second_shards(parameters: Iterable[Any]) -> None:
    """Forget what ZeRO++ (hpZ) keeps of each parameter a second time within a group of ranks; the next forward makes it
    anew. DeepSpeed's forward and backward gather from it as long as it is there, whatever has become of the shards
    since."""
    for parameter in parameters:
        if getattr(parameter, "ds_secondary_tensor", None) is not None:
            parameter.ds_secondary_tensor = None


def _restore_buffers(lm: Any, config: ModelConfig, hf_config: Any) -> None:
    """Give a model made under zero.Init the buffers it should have.

    zero.Init makes every floating tensor of the constructors in the weights' type: rotary frequencies in
    bf16 are off by 0.2 %, which turns far positions into others. A twin without weights has the right ones.
    """
    twin = on_meta(config, hf_config)
    for name, module in twin.named_modules():
        own = {key: buffer for key, buffer in module._buffers.items() if buffer is not None}
        module._buffers.update({key: _unset(b) for key, b in own.items()})
        if own:
            twin._init_weights(module)
        unset = [key for key in own if bool(module._buffers[key].isnan().any())]
        if unset:
            raise ConfigError(f"model.path is {config.path!r}: at ZeRO stage 3 the buffers {unset} of {name} cannot be "
                              "made; use policy.zero_stage 2")
        target = lm.get_submodule(name)
        for key in own:
            target._buffers[key] = module._buffers[key].to(target._buffers[key].device)


def _unset(buffer: Tensor) -> Tensor:
    """A host tensor of NaN, which shows what nothing fills; whole numbers (positions, sizes) have none and stay 0."""
    fill = float("nan") if buffer.is_floating_point() else 0
    return torch.full(buffer.shape, fill, dtype=buffer.dtype, device="cpu")


def _prepare_transformers() -> None:
    ALL_ATTENTION_FUNCTIONS.register(attention.NAME, attention.packed_attention)
    disable_progress_bar()  # one a rank and model


def weight_files(path: str) -> dict[str, str]:
    """Tensor name -> safetensors file. Raises ConfigError where the folder has none."""
    folder = path
    if not os.path.isdir(folder):
        from huggingface_hub import snapshot_download

        folder = snapshot_download(path, allow_patterns=["*.safetensors", "*.json"])
    index = os.path.join(folder, "model.safetensors.index.json")
    single = os.path.join(folder, "model.safetensors")
    if os.path.exists(index):
        with open(index) as file:
            return {name: os.path.join(folder, part) for name, part in json.load(file)["weight_map"].items()}
    if os.path.exists(single):
        with safe_open(single, "pt") as tensors:
            return {name: single for name in tensors.keys()}
    raise ConfigError(f"model.path is {path!r}: no model.safetensors in it; save the weights as safetensors")


def read_weights(files: dict[str, str], names: list[str]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) in the order of `names`; a tensor is mapped from its file, and only what is touched is read."""
    with contextlib.ExitStack() as stack:
        opened = {path: stack.enter_context(safe_open(path, "pt")) for path in sorted({files[n] for n in names})}
        for name in names:
            yield name, opened[files[name]].get_tensor(name)


def _refuse_other_names(config: ModelConfig, missing: Any, unexpected: Any, tied: bool = False) -> None:
    harmless = ("rotary_emb.inv_freq", "lm_head.weight") if tied else ("rotary_emb.inv_freq",)
    unexpected = [name for name in unexpected if not name.endswith(harmless)]
    if missing or unexpected:
        raise ConfigError(f"model.path is {config.path!r}: the files do not hold this model's weights; "
                          f"missing {sorted(missing)[:8]}, unexpected {sorted(unexpected)[:8]}")
