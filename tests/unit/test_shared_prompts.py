"""A prompt computed once gives what copies of it give: log-probs, loss and every gradient, in every model family.

Shared rows are compared with packed copies, and those with plain padded forwards of Transformers.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from spmd_rl.batch import Completion, StepTotals, pack, plan_step
from spmd_rl.config import LossConfig, ModelConfig
from spmd_rl.losses import LossInputs, policy_loss
from spmd_rl.model import build, load_hf_config

CPU = torch.device("cpu")
FAMILIES = ["qwen3", "qwen2", "llama", "gemma3"]
VOCABULARY = 320
TEMPERATURE = 0.8
TOLERANCE = 1e-6  # fp32: largest difference over the tensor's largest magnitude, absolute below magnitude 1

# Prompt and completions of each group: gemma3's window of 32 ends within prompts, at their ends and within completions.
RAGGED = [(40, [9, 30, 1, 0, 50]), (3, [35, 2]), (31, [1, 2]), (32, [40]), (1, [1, 1, 1])]
LAYOUTS = {
    "whole groups": lambda groups: [groups],
    "a row a group": lambda groups: [[group] for group in groups],
    "split groups": lambda groups: [[g[:2] for g in groups], [g[2:] for g in groups if g[2:]]],
    "mixed with copies": lambda groups: [[groups[0], *groups[1], groups[2], *groups[3], groups[4]]],
    "other order": lambda groups: [[g[::-1] for g in groups[::-1]]],
}


def groups_of(shapes=RAGGED, seed=0):
    """Completions with random tokens and advantages."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(count):
        return torch.randint(VOCABULARY, (count,), generator=draw).tolist()

    made = []
    for number, (prompt_length, lengths) in enumerate(shapes):
        prompt = tokens(prompt_length)
        made.append([Completion(number, i, prompt, tokens(n), [-6.0] * n, "stop", 0,
                                advantage=float(torch.randn((), generator=draw))) for i, n in enumerate(lengths)])
    return made


def build_model(folder):
    config = ModelConfig(path=folder, dtype="float32")
    return build(config, load_hf_config(config), 1.0)


@pytest.fixture(scope="module")
def model_of(model_folder):
    """A function from (family, tied) to the model, made once."""
    made = {}

    def model(family, tied=True):
        if (family, tied) not in made:
            made[family, tied] = build_model(model_folder(family, tied=tied))
        return made[family, tied]

    return model


def run(model, rows, totals, block=1):
    """({(group, sample): (logprobs, entropy)}, loss, gradients) of rows of units."""
    model.zero_grad()
    found, total = {}, 0.0
    for row in rows:
        mb = pack(row, CPU, block)
        logprobs_N, entropy_N = model(mb.input_ids_S, mb.positions_S, mb.segments_3S, mb.target_index_N,
                                      mb.target_ids_N, TEMPERATURE)
        inputs = LossInputs(logprobs_N, logprobs_N.detach(), mb.sampler_logprobs_N, mb.advantages_N, mb.sequence_N,
                            mb.lengths_N, entropy_N)
        loss = policy_loss(inputs, LossConfig(importance_sampling_correction=False, entropy_coef=0.1), totals, 64, None,
                           None)
        loss.backward()
        total += loss.item()
        for number, c in enumerate(mb.completions):
            mine = mb.sequence_N == number
            found[c.group, c.sample] = torch.stack([logprobs_N[mine], entropy_N[mine]]).detach()
    return found, total, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("block", [1, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_shared_equals_packed(model_of, close, family, tied, layout, block):
    """Log-probs, entropy, loss and every gradient of one layout with shared prompts against a row of copies."""
    model, groups = model_of(family, tied), groups_of()
    everything = [c for group in groups for c in group]
    totals = StepTotals.of(everything)
    found, loss, grads = run(model, LAYOUTS[layout](groups), totals, block)
    wanted, wanted_loss, wanted_grads = run(model, [everything], totals)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        close(found[key], value, TOLERANCE)
    assert loss == pytest.approx(wanted_loss, abs=TOLERANCE)
    for name, grad in wanted_grads.items():
        close(grads[name], grad, TOLERANCE)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_shared_equals_padded(model_of, model_folder, close, family, tied):
    """Against padded rows through plain Transformers: log-probs, and every gradient of their weighted sum."""
    groups = groups_of()
    model = model_of(family, tied)
    model.zero_grad()
    mb = pack(groups, CPU)
    logprobs_N, _ = model(mb.input_ids_S, mb.positions_S, mb.segments_3S, mb.target_index_N, mb.target_ids_N,
                          TEMPERATURE)
    (logprobs_N * mb.advantages_N / 100).sum().backward()
    plain = AutoModelForCausalLM.from_pretrained(model_folder(family, tied=tied), dtype=torch.float32)
    completions = [c for group in groups for c in group]
    longest = max(c.num_tokens for c in completions)
    ids = torch.tensor([c.prompt_ids + c.token_ids + [0] * (longest - c.num_tokens) for c in completions])
    mask = torch.tensor([[1] * c.num_tokens + [0] * (longest - c.num_tokens) for c in completions])
    logprobs_BS = (plain(input_ids=ids, attention_mask=mask).logits[:, :-1] / TEMPERATURE).log_softmax(-1)
    logprobs_BS = logprobs_BS.gather(-1, ids[:, 1:, None])[..., 0]
    expected_N = torch.cat([row[len(c.prompt_ids) - 1:c.num_tokens - 1]
                            for row, c in zip(logprobs_BS, completions, strict=True)])
    (expected_N * mb.advantages_N / 100).sum().backward()
    close(logprobs_N.detach(), expected_N.detach(), TOLERANCE)
    wanted = dict(plain.named_parameters())
    for name, parameter in model.lm.named_parameters():
        close(parameter.grad, wanted[name].grad, TOLERANCE)


@pytest.mark.parametrize("place", [(group, sample) for group, (_, lengths) in enumerate(RAGGED)
                                   for sample, n in enumerate(lengths) if n])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_tokens_in_a_neighbour_change_nothing_bit_for_bit(model_of, family, place):
    """A completion's tokens replaced by others: the log-probs of all others, of its group too, stay as they were."""
    groups = groups_of()
    before, _, _ = run(model_of(family), [groups], StepTotals(100, 10))
    group, sample = place
    changed = groups[group][sample]
    changed.token_ids = [(token + 1 + i) % VOCABULARY for i, token in enumerate(changed.token_ids)]
    after, _, _ = run(model_of(family), [groups], StepTotals(100, 10))
    for key in before:
        assert torch.equal(before[key], after[key]) == (key != place or not before[key].numel())


@pytest.mark.parametrize("family", FAMILIES)
def test_another_prompt_changes_its_group_alone(model_of, family):
    """A prompt's tokens replaced by others: its group's log-probs change, each of them, and no other's bits."""
    groups = groups_of()
    before, _, _ = run(model_of(family), [groups], StepTotals(100, 10))
    changed = [(token + 7) % VOCABULARY for token in groups[1][0].prompt_ids]
    for c in groups[1]:
        c.prompt_ids = changed
    after, _, _ = run(model_of(family), [groups], StepTotals(100, 10))
    for key in before:
        assert torch.equal(before[key], after[key]) == (key[0] != 1 or not before[key].numel())


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_changes_no_bit(model_folder, family):
    """Blocks computed again in backward see the shared prompts too."""
    model, groups = build_model(model_folder(family)).train(), groups_of()
    _, _, plain = run(model, [groups], StepTotals(100, 10))
    model.lm.gradient_checkpointing_enable({"use_reentrant": False})
    _, _, again = run(model, [groups], StepTotals(100, 10))
    assert all(torch.equal(again[name], grad) for name, grad in plain.items())


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("max_tokens", [20, 100, 4096])
def test_any_plan_of_a_step_gives_one_loss(model_of, close, num_ranks, max_tokens):
    """Rows of all ranks together, shared or not, add up to the same loss and gradients; groups are split where the
    budget wants it."""
    model = model_of("qwen3")
    mixed = sorted((c for group in groups_of() for c in group), key=lambda c: c.sample)  # interleaved
    totals = StepTotals.of(mixed)
    _, wanted_loss, wanted = run(model, [mixed], totals)
    for shared_prompt in (False, True, "auto"):
        plan = plan_step(mixed, num_ranks, max_tokens, shared_prompt)
        found, loss, grads = run(model, [row for rows in plan for row in rows], totals)
        assert len(found) == sum(bool(c.token_ids) for c in mixed)
        assert loss == pytest.approx(wanted_loss, abs=TOLERANCE)
        for name, grad in wanted.items():
            close(grads[name], grad, TOLERANCE)


@pytest.mark.parametrize("tied", [True, False])
def test_bf16_shared_is_near_fp32(model_folder, tied):
    """bf16 weights: log-probs to 0.15 and each gradient to 10 % of its largest entry, as far as packed copies are."""
    fp32 = build_model(model_folder("qwen3", tied=tied))
    config = ModelConfig(path=model_folder("qwen3", tied=tied), dtype="bfloat16")
    bf16 = build(config, load_hf_config(config), 1.0)
    groups = groups_of()
    everything = [c for group in groups for c in group]
    wanted, _, wanted_grads = run(fp32, [everything], StepTotals.of(everything))
    for rows in ([groups], [everything]):
        found, _, grads = run(bf16, rows, StepTotals.of(everything))
        for key, value in wanted.items():
            assert not value.numel() or (found[key] - value).abs().max() <= 0.15
        for name, grad in wanted_grads.items():
            assert (grads[name].float() - grad).abs().max() <= 0.1 * grad.abs().max(), name
