"""DeepSpeed's config from ours, the buckets that weights are gathered in, and what a pass executes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from spmd_rl import shards
from spmd_rl.batch import StepTotals, pack, work
from spmd_rl.config import Config, ConfigError, LossConfig, ModelConfig
from spmd_rl.losses import LOSSES, LossInputs, loss_metrics, policy_loss
from spmd_rl.model import build, checkpoint_blocks, load_hf_config, shape
from spmd_rl.policy import Engine, _buckets, _make_optimizer, deepspeed_config, row_lengths


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_our_fields_reach_deepspeed(stage, dtype):
    """Stage, type and clipping are what the config says; clipping is there also at 0, or DeepSpeed clips at 1."""
    config = Config()
    config.model.dtype, config.policy.max_grad_norm = dtype, 0.0
    found = deepspeed_config(config, stage)
    assert found["zero_optimization"]["stage"] == stage
    assert found["bf16"]["enabled"] == (dtype == "bfloat16")
    assert found["gradient_clipping"] == 0.0
    assert found["gradient_accumulation_steps"] == found["train_micro_batch_size_per_gpu"] == 1


def test_raw_options_are_merged_key_by_key():
    """A raw option joins its section: it does not take the section's place."""
    config = Config(deepspeed={"zero_optimization": {"overlap_comm": False, "memory_efficient_linear": True},
                               "wall_clock_breakdown": True})
    found = deepspeed_config(config, 2)
    assert found["zero_optimization"] == {"stage": 2, "overlap_comm": False, "memory_efficient_linear": True}
    assert found["wall_clock_breakdown"] is True
    assert config.deepspeed["zero_optimization"] == {"overlap_comm": False, "memory_efficient_linear": True}


def parameters(sizes, dtype=torch.float32):
    return [(f"p{i}", torch.nn.Parameter(torch.empty(n, dtype=dtype))) for i, n in enumerate(sizes)]


@pytest.mark.parametrize("sizes, limit, expected", [
    ([1, 2, 3, 4], 24, [[0, 1, 2], [3]]),  # 4 + 8 + 12 = 24 bytes fit
    ([1, 2, 3, 4], 23, [[0, 1], [2], [3]]),
    ([1, 100, 1], 24, [[0], [1], [2]]),  # the larger one alone
    ([100], 4, [[0]]), ([], 24, []), ([1, 1, 1], 10**9, [[0, 1, 2]])])
def test_buckets_keep_order_and_size(sizes, limit, expected):
    """Neighbours together up to the limit in bytes, each parameter once, a larger one alone."""
    found = [[name for name, _ in bucket] for bucket in _buckets(parameters(sizes), limit)]
    assert found == [[f"p{i}" for i in bucket] for bucket in expected]


def test_a_sharded_parameter_counts_as_a_whole_one():
    """At stage 3 a parameter has no elements of its own: its size is ds_numel. bf16 is 2 bytes."""
    named = parameters([0, 0], torch.bfloat16)
    for _, parameter in named:
        parameter.ds_numel = 10
    assert len(list(_buckets(named, 39))) == 2 and len(list(_buckets(named, 40))) == 1


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_norms_and_biases_do_not_decay(weight_decay):
    """Matrices decay, vectors do not; every trainable parameter is in one group; a frozen one in none."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
    net[2].weight.requires_grad_(False)
    config = Config()
    config.policy.weight_decay, config.policy.learning_rate = weight_decay, 0.25
    optimizer = _make_optimizer(net, config, torch.device("cpu"))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decays) == sum(len(group["params"]) for group in optimizer.param_groups) == 5
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            assert decays[id(parameter)] == (weight_decay if parameter.ndim == 2 else 0.0), name
    assert all(group["lr"] == 0.25 for group in optimizer.param_groups)


def test_sgd_is_plain():
    """Without momentum or decay: one step is the weight less learning rate times gradient."""
    net = torch.nn.Linear(1, 1, bias=False)
    config = Config()
    config.policy.optimizer, config.policy.learning_rate, config.policy.weight_decay = "sgd", 0.5, 0.1
    before = net.weight.item()
    optimizer = _make_optimizer(net, config, torch.device("cpu"))
    for step in (1, 2):
        net.weight.grad = torch.full((1, 1), 3.0)
        optimizer.step()
        assert net.weight.item() == pytest.approx(before - 1.5 * step)


@pytest.mark.parametrize("mine, words", [
    ({"a": (2, 3), "b": (4,)}, None),
    ({"a": (2, 2), "b": (4,)}, r"1 parameters differ, a .*\(2, 3\) there, \(2, 2\) here"),
    ({"a": (2, 3), "c": (4,)}, r"2 parameters differ, b .*\(4,\) there, None here")])
def test_a_checkpoint_of_another_model_is_refused(tmp_path, mine, words):
    """Also where its tensors are larger, and the ranges that are asked for are all there."""
    shards.write(str(tmp_path), "rank-0", [], {"a": (2, 3), "b": (4,)})
    engine = SimpleNamespace(shapes=lambda: mine, _config=Config())
    with shards.Shards(str(tmp_path)) as found:
        if words is None:
            Engine._check_shapes(engine, found)
        else:
            with pytest.raises(ConfigError, match=f"the checkpoint is of another model; {words}"):
                Engine._check_shapes(engine, found)


@pytest.mark.parametrize("max_tokens, max_model_len, expected", [
    (16384, 1024, [8192, 16384]), (16384, 16384, [8192, 16384]), (16384, 16385, [8192, 16384, 32768]),
    (1000, 5000, [512, 1024, 2048, 4096, 8192]), (1, 1, [128, 128]), (100, 300, [128, 128, 256, 512])])
def test_rows_take_few_lengths(max_tokens, max_model_len, expected):
    """Half the budget, the budget, and doubles until the longest sequence fits, in whole blocks of 128."""
    assert row_lengths(max_tokens, max_model_len) == expected


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("threshold", [None, 1.0])
def test_no_loss_reads_from_the_device(loss_type, level, threshold):
    """Loss, backward and metrics of a row on tensors without data: a host that waits for a value fails here."""
    config = LossConfig(loss_type=loss_type, importance_sampling_level=level, beta=0.1, entropy_coef=0.1,
                        epsilon_high=5.0 if loss_type == "cispo" else None)
    with FakeTensorMode():
        values = [torch.empty(9) for _ in range(7)]
        logprobs_N, entropy_N = (torch.empty(9, requires_grad=True) for _ in range(2))
        inputs = LossInputs(logprobs_N, values[0], values[1], values[2], torch.empty(9, dtype=torch.long), values[3],
                            entropy_N, values[4], values[5])
        policy_loss(inputs, config, StepTotals(9, 2), 16, None, threshold).backward()
        loss_metrics(inputs, config)


@pytest.mark.parametrize("every, checkpointed, share", [(1, [True] * 4, 1), (2, [True, False] * 2, 0.5),
                                                        (3, [True, False, False, True], 0.5),
                                                        (9, [True, False, False, False], 0.25)])
def test_every_nth_block_is_checkpointed(model_folder, every, checkpointed, share):
    """The first of each so many blocks; the share is what the operations count as recomputed."""
    config = ModelConfig(path=model_folder("qwen3", num_layers=4), dtype="float32")
    lm = build(config, load_hf_config(config), 1.0).lm
    assert checkpoint_blocks(lm, every) == share
    assert [layer.gradient_checkpointing for layer in lm.model.layers] == checkpointed


def test_adamw_is_fused():
    """One kernel over all parameters in place of several a parameter."""
    optimizer = _make_optimizer(torch.nn.Linear(2, 2), Config(), torch.device("cpu"))
    assert isinstance(optimizer, torch.optim.AdamW) and all(group["fused"] for group in optimizer.param_groups)


@pytest.mark.parametrize("shared_prompt", [False, True])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "gemma3"])
def test_executed_operations_are_those_of_the_pass(model_folder, completion, family, every, shared_prompt):
    """torch's counter over a row's forward and backward: the products of linear layers and head, blocks that are
    computed again counted twice. (Attention on a CPU is padded, and counted apart.)"""
    config = ModelConfig(path=model_folder(family, num_layers=4), dtype="float32")
    net = build(config, load_hf_config(config), 1.0).train()
    recomputed = checkpoint_blocks(net.lm, every)
    group = [completion([5] * n, prompt_ids=[1] * 40, sample=n) for n in (20, 30, 10)]
    units = [group] if shared_prompt else [[c] for c in group]
    mb = pack(units, torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        logprobs_N, _ = net(mb.input_ids_S, mb.positions_S, mb.segments_3S, mb.target_index_N, mb.target_ids_N, 1.0)
        logprobs_N.sum().backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(counted.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    found = work([units], shape(net.lm))
    assert replace(found, attention=0).training(recomputed) == pytest.approx(products, rel=0.002)
