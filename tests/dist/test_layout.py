"""The loss, the metrics and the updated weights do not depend on how a step is laid out.

`layouts` has the table: ranks, ZeRO stages, token budgets, losses, each with a step in which all ranks but one train
nothing. Every cell is compared with one rank at stage 0, and that one with a float64 model of plain Transformers on
padded rows. A cell is a few tenths of a second; the ranks start once a table. `tools/check_layouts.py` prints it.
"""

import launching
import pytest
import torch
from layouts import (COPIES, LOSSES, RANKS, ROWS, STAGES, STANDARD, Learned, cell_of, gaps_of, padded_reference,
                     too_large, weight_gap)
from transformers import AutoModelForCausalLM

CORE_ROWS = {1: "one-row", 2: "some-rows", 4: "row-each"}
FAMILY_STAGES = {loss: 2 + number % 2 for number, loss in enumerate(LOSSES)}  # the sharded ones by turns
SHARED_ROWS = {1: "shared", 2: "shared-rows", 4: "shared-split"}
UNTIED = ["dapo", "grpo-kl"]
# Weights sharded over all ranks and again within pairs of them, the smallest ones (of 64) kept whole.
SECOND = {"deepspeed": {"zero_optimization": {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 100}}}
SECOND_LOSSES = ["dapo", "grpo-kl", "kl-moving"]  # without a reference, with one that stays, with one that moves
# DeepSpeed's hooks on whole blocks in place of every module.
BLOCKS = {"deepspeed": {"zero_optimization": {"leaf_module": {"classes": ["Qwen3DecoderLayer"]},
                                              "stage3_param_persistence_threshold": 100}}}
BLOCK_LOSSES = ["dapo", "kl-moving"]
WHOLE_ROWS = [*COPIES, "shared-rows"]
BF16_ROWS = ["one-row", "row-each", "shared"]


def core_cells(num_ranks):
    """Every stage at one way to fill rows, another for each number of ranks, with copies of prompts and shared ones;
    every loss on one rank and on two, and shared on one."""
    cells = [cell_of(stage, rows[num_ranks], "dapo") for stage in STAGES for rows in (CORE_ROWS, SHARED_ROWS)]
    if num_ranks == 1:
        cells += [cell_of(0, "shared-split", loss) for loss in LOSSES]
    if num_ranks == 2:
        cells += [cell_of(3, "shared-split", loss, **BLOCKS) for loss in BLOCK_LOSSES]
    if num_ranks == 4:
        cells += [cell_of(3, "some-rows", loss, **SECOND) for loss in SECOND_LOSSES]
    stages = {1: dict.fromkeys(LOSSES, 0), 2: FAMILY_STAGES, 4: {}}[num_ranks]
    return cells + [cell_of(stage, CORE_ROWS[num_ranks], loss) for loss, stage in stages.items() if loss != "dapo"]


def whole_cells(num_ranks):
    return [cell_of(stage, rows, loss) for stage in STAGES for rows in WHOLE_ROWS for loss in LOSSES]


def untied_cells(num_ranks):
    return [cell_of(stage, rows, loss) for stage in STAGES for rows in ROWS for loss in UNTIED]


def bf16_cells(num_ranks):
    return [cell_of(stage, rows, "dapo", dtype="bfloat16") for stage in STAGES for rows in BF16_ROWS]


TABLES = {"core": core_cells, "whole": whole_cells, "untied": untied_cells, "bf16": bf16_cells}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Random weights: log-probs as near to 0 as can be, and their rounding with them."""
    folder = tmp_path_factory.mktemp("random")
    return {name: launching.make_model(folder / name, tied=name == "tied", sft_steps=0) for name in ("tied", "untied")}


@pytest.fixture(scope="module")
def learned(models, tmp_path_factory):
    return Learned(models, tmp_path_factory.mktemp("learned"), TABLES)


def assert_same(cell, standard, loss):
    found = too_large(gaps_of(cell, standard), loss)
    assert not found, f"beyond its tolerance: {found}"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_step_does_not_depend_on_layout(learned, num_ranks, stage):
    """Loss, all metrics, gradient norm and updated weights equal those of one rank at stage 0 with all in one row."""
    cell = learned.cell("core", num_ranks, stage, CORE_ROWS[num_ranks], "dapo")
    assert_same(cell, learned.cell("core", *STANDARD, "dapo"), "dapo")


@pytest.mark.parametrize("loss", LOSSES)
def test_no_loss_depends_on_layout(learned, loss):
    """The same for every loss on two ranks with sharded gradients or weights, in rows of 40 tokens."""
    cell = learned.cell("core", 2, FAMILY_STAGES[loss], "some-rows", loss)
    assert_same(cell, learned.cell("core", *STANDARD, loss), loss)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_shared_prompts_change_no_step(learned, num_ranks, stage):
    """The same with prompts computed once: whole groups in a row, rows of groups, parts of groups."""
    cell = learned.cell("core", num_ranks, stage, SHARED_ROWS[num_ranks], "dapo")
    assert_same(cell, learned.cell("core", *STANDARD, "dapo"), "dapo")


@pytest.mark.parametrize("loss", LOSSES)
def test_shared_prompts_change_no_loss(learned, loss):
    """The same for every loss, with groups cut into parts of 20 tokens."""
    cell = learned.cell("core", 1, 0, "shared-split", loss)
    assert_same(cell, learned.cell("core", *STANDARD, loss), loss)


@pytest.mark.parametrize("loss", SECOND_LOSSES)
def test_second_shards_change_no_step(learned, loss):
    """ZeRO++'s hpZ: four ranks in pairs; all but the first gather are within a pair. DeepSpeed makes a pair's shards
    when it makes the model, before there are weights, and gathers from them as long as they are there. None is there
    before the first rollout, after one is learned, also without a trained token, and of a reference after forward."""
    results, weights = learned.cell("core", 4, 3, "some-rows", loss)
    assert_same((results, weights), learned.cell("core", *STANDARD, loss), loss)
    found = results[-1]["second_shards"]
    assert found["in training"] > 0 and not any(found["left"]) and len(found["left"]) >= 4


@pytest.mark.parametrize("loss", BLOCK_LOSSES)
def test_blocks_as_a_whole_change_no_step(learned, loss):
    """A block's weights gathered and its gradients reduced at once, also those of a reference that moves."""
    results, weights = learned.cell("core", 2, 3, "shared-split", loss)
    assert results[-1]["leaves"] == 2  # a layer each
    assert_same((results, weights), learned.cell("core", *STANDARD, loss), loss)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_without_tokens_take_part(learned, num_ranks):
    """In the first rollout one rank has the 6 trained tokens and each other one a row without targets; the tokens of
    masked completions are nobody's targets."""
    results, _ = learned.cell("core", num_ranks, 3, CORE_ROWS[num_ranks], "dapo")
    few, ragged = ([rows for (rows,) in result["targets"]] for result in results)  # one update a rollout
    assert sorted(few) == [[0]] * (num_ranks - 1) + [[6]]
    assert sum(map(sum, ragged)) == 9 + 2 + 16 + 1 + 4 + 7 + 3 + 12 + 6 + 5 + 8
    assert len({len(rows) for rows in ragged}) == 1 and len(ragged[0]) > 1


@pytest.mark.parametrize("num_ranks, rows", [(1, "one-row"), (2, "some-rows")])
def test_case_54_a_part_that_is_left_over_is_an_update_of_its_own(learned, models, num_ranks, rows):
    """Three groups in mini-batches of two: two updates a rollout, the second of the group left over, normalised by its
    own tokens (`padded_reference` does so by itself); nothing of it waits for the next rollout."""
    stage = 0 if num_ranks == 1 else FAMILY_STAGES["minibatches"]
    results, weights = learned.cell("core", num_ranks, stage, rows, "minibatches")
    tokens = [[sum(map(sum, update)) for update in zip(*result["targets"])] for result in results]
    assert tokens == [[6], [9 + 2 + 16 + 1 + 4 + 7 + 3 + 12, 6 + 5 + 8]]
    assert_same((results, weights), padded_reference(models["tied"], "minibatches"), "minibatches")


@pytest.mark.parametrize("loss", LOSSES)
def test_standard_is_a_padded_float64_model(learned, models, loss):
    """One rank, stage 0, one packed row equals plain Transformers: loss, metrics, gradient norm and weights."""
    assert_same(learned.cell("core", *STANDARD, loss), padded_reference(models["tied"], loss), loss)


@pytest.mark.parametrize("loss", LOSSES)
def test_no_two_losses_are_one(learned, models, loss):
    """Each option in the table has an effect: its weights are none of the others', and differ from the start by far
    more than the tolerance."""
    _, weights = learned.cell("core", *STANDARD, loss)
    others = [learned.cell("core", *STANDARD, other)[1] for other in LOSSES if other != loss]
    before = AutoModelForCausalLM.from_pretrained(models["tied"]).state_dict()
    assert min(weight_gap(weights, other) for other in others) > 1e-5
    assert weight_gap(weights, {name: before[name] for name in weights}) > 1e-3


@pytest.mark.parametrize("rows", BF16_ROWS)
@pytest.mark.parametrize("stage", STAGES)
def test_bf16_is_near_fp32(learned, stage, rows):
    """bf16 weights with fp32 masters, 2 ranks: losses are fp32's to 2 % and gradient norms to 3 %, also summed over
    many rows; the weights are bf16, and fp32's to their rounding (2^-8 of a value) and the update's own."""
    standard, standard_weights = learned.cell("core", *STANDARD, "dapo")
    results, weights = learned.cell("bf16", 2, stage, rows, "dapo")
    for result, want in zip(results, standard, strict=True):
        assert result["loss"] == pytest.approx(want["loss"], rel=2e-2, abs=2e-2)
        assert result["grad_norm"] == pytest.approx(want["grad_norm"], rel=3e-2)
    assert all(tensor.dtype == torch.bfloat16 for tensor in weights.values())
    assert weight_gap({name: tensor.float() for name, tensor in weights.items()}, standard_weights) <= 1e-2


@pytest.mark.long
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("rows", WHOLE_ROWS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_whole_table(learned, num_ranks, stage, rows, loss):
    """The same for each number of ranks, stage, way to fill rows and loss."""
    assert_same(learned.cell("whole", num_ranks, stage, rows, loss), learned.cell("whole", *STANDARD, loss), loss)


@pytest.mark.long
@pytest.mark.parametrize("loss", UNTIED)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_whole_table_untied(learned, num_ranks, stage, rows, loss):
    """The same for a model with an output layer of its own."""
    standard = learned.cell("untied", *STANDARD, loss, model="untied")
    assert_same(learned.cell("untied", num_ranks, stage, rows, loss, model="untied"), standard, loss)


def test_the_tool_prints_the_table(tmp_path, capsys):
    """A line a cell with its gaps, the padded references among them, and the verdict."""
    tool = launching.load_tool("check_layouts")
    assert tool.main(["--losses", "gspo", "--ranks", "1", "--stages", "0", "--rows", "row-each"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("gspo")] == ["gspo"] * 3
    assert lines[-1].startswith("3 rows of 1 losses: none beyond")
