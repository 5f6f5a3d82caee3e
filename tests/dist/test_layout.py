"""The loss and the updated weights do not depend on how a step is laid out over ranks, ZeRO stages and micro-batches.

Two optimizer steps in a row (SGD, fp32): a ragged one with a flat group, and one with a single trained completion, so
that all ranks but one train nothing. Every cell is compared with the one of 1 rank at stage 0, and that one with a
float64 model of plain Transformers on padded rows. A cell is a few tenths of a second; the ranks start once a table.
"""

import copy
import json
from pathlib import Path

import pytest
import torch
import worker_learn
from launching import ROOT, Once, torchrun
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from spmd_rl.batch import StepTotals

WORKER = str(ROOT / "tests" / "dist" / "worker_learn.py")
BUDGETS = {"one-row": 4096, "some-rows": 40, "row-each": 1}
LOSSES = {"dapo": ("dapo", 0.0), "grpo-kl": ("grpo", 0.1)}
RANKS = [1, 2, 4]
CORE_BUDGET = {1: "one-row", 2: "some-rows", 4: "row-each"}
STAGES = [0, 1, 2, 3]
# k3 hands a log-prob's error on times e^d - 1, here up to 3.7 on one of 6 tokens. Against float64, rounding the weights
# to fp32 alone moves this metric by 1e-6, and a plain fp32 forward by 2.2e-6: two layouts may differ by twice that.
KL_TOLERANCE = 4.5e-6


def cell_name(stage, budget, loss):
    return f"stage{stage}-{budget}-{loss}"


class Learned:
    """Cells by name: results and weights, from one launch a number of ranks, model and table, made when asked for."""

    def __init__(self, models, folder):
        self._models, self._folder = models, folder
        self._launched = Once(self._launch)

    def cell(self, table, num_ranks, model, name):
        path = self._launched(table, num_ranks, model) / name
        return json.loads(Path(f"{path}.json").read_text()), load_file(f"{path}.safetensors")

    def _launch(self, table, num_ranks, model):
        folder = self._folder / f"{table}-{num_ranks}-{model}"
        folder.mkdir()
        cells = [dict(name=cell_name(stage, budget, loss), stage=stage, budget=BUDGETS[budget],
                      loss_type=LOSSES[loss][0], beta=LOSSES[loss][1],
                      dtype="bfloat16" if table == "bf16" else "float32")
                 for stage, budget, loss in TABLES[table](num_ranks)]
        job = folder / "job.json"
        job.write_text(json.dumps(dict(model=str(self._models[model]), folder=str(folder), cells=cells)))
        torchrun(num_ranks, [WORKER, str(job)]).succeeded()
        return folder


def core_cells(num_ranks):
    """Every stage at one budget, another one for each number of ranks; one rank has the standard of both losses."""
    cells = [(stage, CORE_BUDGET[num_ranks], "dapo") for stage in STAGES]
    return cells + [(0, "one-row", "grpo-kl")] if num_ranks == 1 else cells


def whole_cells(num_ranks):
    return [(stage, budget, loss) for stage in STAGES for budget in BUDGETS for loss in LOSSES]


def bf16_cells(num_ranks):
    return [(stage, budget, "dapo") for stage in STAGES for budget in ("one-row", "row-each")]


TABLES = {"core": core_cells, "whole": whole_cells, "bf16": bf16_cells}


@pytest.fixture(scope="module")
def learned(models, tmp_path_factory):
    return Learned(models, tmp_path_factory.mktemp("learned"))


def assert_close(found, expected, tolerance=1e-6):
    """Largest difference over the tensor's largest magnitude, absolute below magnitude 1."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        want = expected[name].double()
        gap = float((tensor.double() - want).abs().max()) / max(1.0, float(want.abs().max()))
        assert gap <= tolerance, f"{name} differs by {gap:.2e}, more than {tolerance:.0e}"


def assert_same_cell(cell, standard):
    (results, weights), (standard_results, standard_weights) = cell, standard
    for result, want in zip(results, standard_results, strict=True):
        assert result["loss"] == pytest.approx(want["loss"], abs=1e-6)
        assert result["entropy"] == pytest.approx(want["entropy"], rel=1e-6)
        assert result.get("kl") == pytest.approx(want.get("kl"), abs=KL_TOLERANCE)
    assert_close(weights, standard_weights)


def assert_same_norms(cell, standard):
    for result, want in zip(cell[0], standard[0], strict=True):
        assert result["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-6)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_step_does_not_depend_on_layout(learned, num_ranks, stage):
    """Loss, entropy and updated weights equal those of one rank at stage 0 with all in one row."""
    standard = learned.cell("core", 1, "tied", cell_name(0, "one-row", "dapo"))
    cell = learned.cell("core", num_ranks, "tied", cell_name(stage, CORE_BUDGET[num_ranks], "dapo"))
    assert_same_cell(cell, standard)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_gradient_norm_does_not_depend_on_layout(learned, num_ranks, stage):
    """The reported norm, before clipping, equals that of one rank at stage 0."""
    standard = learned.cell("core", 1, "tied", cell_name(0, "one-row", "dapo"))
    cell = learned.cell("core", num_ranks, "tied", cell_name(stage, CORE_BUDGET[num_ranks], "dapo"))
    assert_same_norms(cell, standard)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_without_tokens_take_part(learned, num_ranks):
    """In the second step one rank has the 6 trained tokens and each other one a row without targets."""
    results, _ = learned.cell("core", num_ranks, "tied", cell_name(3, CORE_BUDGET[num_ranks], "dapo"))
    ragged, few = (result["targets"] for result in results)
    assert sorted(few) == [[0]] * (num_ranks - 1) + [[6]]
    assert sum(map(sum, ragged)) == 9 + 2 + 16 + 1 + 4 + 7 + 3 + 12 + 6 + 5 + 8
    assert len({len(rows) for rows in ragged}) == 1 and len(ragged[0]) > 1


@pytest.mark.parametrize("budget", ["one-row", "row-each"])
@pytest.mark.parametrize("stage", STAGES)
def test_bf16_is_near_fp32(learned, stage, budget):
    """bf16 weights with fp32 masters, 2 ranks: losses are fp32's to 2 % and gradient norms to 3 %, also summed over
    many rows; the weights are bf16, and fp32's to their rounding (2^-8 of a value) and the update's own."""
    standard, standard_weights = learned.cell("core", 1, "tied", cell_name(0, "one-row", "dapo"))
    results, weights = learned.cell("bf16", 2, "tied", cell_name(stage, budget, "dapo"))
    for result, want in zip(results, standard, strict=True):
        assert result["loss"] == pytest.approx(want["loss"], rel=2e-2, abs=2e-2)
        assert result["grad_norm"] == pytest.approx(want["grad_norm"], rel=3e-2)
    assert all(tensor.dtype == torch.bfloat16 for tensor in weights.values())
    assert_close({name: tensor.float() for name, tensor in weights.items()}, standard_weights, 1e-2)


@pytest.mark.long
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("model", ["tied", "untied"])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_whole_table(learned, num_ranks, stage, budget, model, loss):
    """The same for each budget, each loss (one with a reference), and a model with an output layer of its own."""
    standard = learned.cell("whole", 1, model, cell_name(0, "one-row", loss))
    cell = learned.cell("whole", num_ranks, model, cell_name(stage, budget, loss))
    assert_same_cell(cell, standard)
    assert_same_norms(cell, standard)


# The standard itself, against an independent computation. -----------------------------------------------------------


def reference_steps(folder, loss_type, beta):
    """The same steps by plain Transformers in float64 on rows padded at the right, without any of our code but the
    fixed completions: (loss, gradient norm) of each step, and the weights after all of them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    frozen = copy.deepcopy(model)
    results = []
    for step in worker_learn.STEPS:
        completions = worker_learn.completions_of(step)
        rewards = torch.tensor([c.reward for c in completions], dtype=torch.float64)
        advantages = torch.zeros_like(rewards)
        for group in {c.group for c in completions}:
            members = torch.tensor([c.group == group for c in completions])
            centred = rewards[members] - rewards[members].mean()
            advantages[members] = centred / (centred.square().sum() / (members.sum() - 1)).sqrt().add(1e-4)
        rows = [c.prompt_ids + c.token_ids for c in completions]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        trained = torch.tensor([[len(c.prompt_ids) <= place < c.num_tokens for place in range(1, width)]
                                for c in completions])

        def logprobs(net):
            logits = net(input_ids=ids, attention_mask=mask).logits[:, :-1] / worker_learn.TEMPERATURE
            return torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]

        new = logprobs(model)
        token_loss = -(new - new.detach()).exp() * advantages[:, None]
        if beta:
            with torch.no_grad():
                difference = logprobs(frozen)
            difference = difference - new
            token_loss = token_loss + beta * (difference.exp() - difference - 1)
        token_loss = torch.where(trained, token_loss, 0.0)
        totals = StepTotals(int(trained.sum()), int(trained.any(1).sum()))
        if loss_type == "dapo":
            loss = token_loss.sum() / totals.tokens
        else:
            loss = (token_loss.sum(1) / trained.sum(1).clamp(min=1)).sum() / totals.sequences
        model.zero_grad()
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        scale = worker_learn.LEARNING_RATE * min(1.0, worker_learn.MAX_GRAD_NORM / float(norm))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= scale * parameter.grad
        results.append((loss.item(), norm.item()))
    return results, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("loss", LOSSES)
def test_standard_is_a_padded_float64_model(learned, models, loss):
    """One rank, stage 0, one packed row equals plain Transformers: loss, weights and gradient norm."""
    results, weights = learned.cell("core", 1, "tied", cell_name(0, "one-row", loss))
    expected, expected_weights = reference_steps(models["tied"], *LOSSES[loss])
    assert [result["loss"] for result in results] == pytest.approx([want for want, _ in expected], abs=1e-6)
    assert_close(weights, expected_weights)
    assert [result["grad_norm"] for result in results] == pytest.approx([want for _, want in expected], rel=1e-6)


def test_steps_move_the_weights(learned, models):
    """The comparisons above are of weights that changed by far more than their tolerance."""
    _, weights = learned.cell("core", 1, "tied", cell_name(0, "one-row", "dapo"))
    before = AutoModelForCausalLM.from_pretrained(models["tied"]).state_dict()
    moved = max(float((tensor - before[name]).abs().max()) for name, tensor in weights.items())
    assert moved > 1e-2
